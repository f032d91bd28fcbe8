"""A memory with the newest tokens kept apart: decoding that can be taken back.

Writing the memory of a head, `Dqk · Dv` numbers, is most of the work of decoding a token; reading
it is the other part. So the last tokens' keys, values and gates stay in slots of their own and are
read beside the memory (one chunk of the chunkwise form), until they are folded into it, many at a
time. A token that is not folded yet is forgotten by forgetting its slot: speculative decoding needs
no copies of the memory.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

InputGate = Literal["exp", "sigmoid"]


class LazyState(NamedTuple):
    """A memory, and slots for the tokens after it.

    Attributes:
      c: `[B, H, Dqk, Dv]`, n: `[B, H, Dqk]`, m: float32 `[B, H]`: the state of `mlstm`.
      k: `[B, S, H, Dqk]`, v: `[B, S, H, Dv]`: keys and values of the tokens in the slots.
      i, f: float32 `[B, S, H]`: their gates before activation.
    """

    c: Float[Array, "B H K V"]
    n: Float[Array, "B H K"]
    m: Float32[Array, "B H"]
    k: Float[Array, "B S H K"]
    v: Float[Array, "B S H V"]
    i: Float32[Array, "B S H"]
    f: Float32[Array, "B S H"]


def read_lazily(
    q: Float[Array, "B T H K"],
    tokens: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    state: LazyState,
    used: Int[Array, " B"],
    real: Bool[Array, "B T"],
    *,
    eps: float = 1e-6,
    scale: float | None = None,
    input_gate: InputGate = "exp",
    normalize: bool = True,
) -> Float[Array, "B T H V"]:
    """Outputs of a few new tokens: one chunk over the slots and the tokens themselves.

    The work is `T · (S + T)` products beside one reading of the memory, so T should be small; for
    long blocks see `mlstm` with the slots' tokens before the block.

    Args:
      q: `[B, T, H, Dqk]`, queries of the new tokens.
      tokens: their `(k, v, i, f)`, `[B, T, H, …]`, not yet in the slots.
      state: the memory and the tokens after it.
      used: int32 `[B]`, slots of each row that hold a token, the first ones.
      real: bool `[B, T]`, False for padding among the new tokens.
      eps, scale, input_gate, normalize: as in `mlstm`.

    Returns:
      `[B, T, H, Dv]` in q's dtype.
    """
    block = q.shape[1]
    slots = state.k.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k, v, i, f = all_tokens(state, tokens)
    valid = jnp.concatenate([jnp.arange(slots) < used[:, None], real], axis=1)[..., None]
    log_i = i if input_gate == "exp" else jax.nn.log_sigmoid(i)
    log_i = jnp.where(valid, log_i, -jnp.inf)
    log_f = jnp.where(valid, jax.nn.log_sigmoid(f), 0.0)

    decay = jnp.cumsum(log_f, axis=1)  # [B, S + T, H], of the memory up to each token
    own = decay[:, slots:]
    seen = jnp.arange(slots + block) <= slots + jnp.arange(block)[:, None]
    log_d = own[:, :, None] - decay[:, None] + log_i[:, None]  # [B, T, S + T, H]
    log_d = jnp.where(seen[..., None], log_d, -jnp.inf)
    log_memory = own + state.m[:, None]
    m = jnp.zeros_like(own)
    if input_gate == "exp":
        m = jnp.maximum(log_memory, jnp.max(log_d, axis=2))
    d = jnp.exp(log_d - m[:, :, None])
    from_memory = jnp.exp(log_memory - m)[..., None]  # [B, T, H, 1]

    product = dict(preferred_element_type=jnp.float32)
    weights = scale * jnp.einsum("bthk,bshk->btsh", q, k, **product) * d
    h = jnp.einsum("btsh,bshv->bthv", weights.astype(v.dtype), v, **product)
    scaled = scale * q.astype(jnp.float32) * from_memory
    h += jnp.einsum("bthk,bhkv->bthv", scaled.astype(state.c.dtype), state.c, **product)
    if normalize:
        weight = jnp.sum(weights, axis=2)
        weight += jnp.einsum("bthk,bhk->bth", scaled, state.n.astype(jnp.float32))
        floor = jnp.exp(-m) if input_gate == "exp" else 1.0
        h = h / (jnp.maximum(jnp.abs(weight), floor) + eps)[..., None]
    return h.astype(q.dtype)


def append_lazily(
    tokens: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    state: LazyState,
    used: Int[Array, " B"],
    num_tokens: Int[Array, " B"],
    fold: Int[Array, " B"],
    *,
    input_gate: InputGate = "exp",
) -> LazyState:
    """The oldest `fold` tokens of each row folded into the memory, the others in the slots.

    Args:
      tokens: `(k, v, i, f)` of new tokens, `[B, T, H, …]`.
      state: what they come after.
      used: int32 `[B]`, slots of each row that hold a token.
      num_tokens: int32 `[B]`, how many of the new tokens are real, the first ones.
      fold: int32 `[B]`, at least `used + num_tokens - S` and at most `used + num_tokens`.
    """
    slots = state.k.shape[1]
    block = tokens[0].shape[1]
    place = jnp.arange(slots + block)
    # Where each token comes in its row: those in the slots, then the new ones.
    order = jnp.where(place < slots, place, used[:, None] + place - slots)
    real = jnp.where(place < slots, place < used[:, None], place - slots < num_tokens[:, None])
    everything = all_tokens(state, tokens)
    folded = fold_tokens(
        *everything,
        (state.c, state.n, state.m),
        real & (order < fold[:, None]),
        input_gate=input_gate,
    )
    wanted = fold[:, None] + jnp.arange(slots)
    source = jnp.where(wanted < used[:, None], wanted, slots + wanted - used[:, None])
    source = jnp.clip(source, 0, slots + block - 1)  # what is beyond a row's tokens is not read
    kept = (
        jnp.take_along_axis(x, source[:, :, *[None] * (x.ndim - 2)], axis=1) for x in everything
    )
    return LazyState(*folded, *kept)


def put_lazily(
    tokens: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
    state: LazyState,
    used: Int[Array, " B"],
    num_tokens: Int[Array, " B"],
) -> LazyState:
    """As `append_lazily` with nothing to fold: the memory is not touched, only slots are written.

    `used + num_tokens` must be at most S in every row.
    """
    token = jnp.arange(tokens[0].shape[1])
    slots = state.k.shape[1]
    place = jnp.where(token < num_tokens[:, None], used[:, None] + token, slots)
    rows = jnp.arange(place.shape[0])[:, None]
    k, v, i, f = (
        old.at[rows, place].set(new.astype(old.dtype), mode="drop")
        for old, new in zip(state[3:], tokens, strict=True)
    )
    return LazyState(state.c, state.n, state.m, k, v, i, f)


def fold_tokens(
    k: jax.Array,
    v: jax.Array,
    i: jax.Array,
    f: jax.Array,
    state: tuple[jax.Array, jax.Array, jax.Array],
    mask: jax.Array,
    *,
    input_gate: InputGate = "exp",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The state `(c, n, m)` after the tokens `[B, T, H, …]` that `mask`, bool `[B, T]`, lets in."""
    c, n, m = state
    mask = mask[..., None]
    log_f = jnp.where(mask, jax.nn.log_sigmoid(f), 0.0)
    log_i = i if input_gate == "exp" else jax.nn.log_sigmoid(i)
    # Summed from the end: the difference of two sums from the beginning would lose digits.
    after = jax.lax.cumsum(log_f, axis=1, reverse=True)
    log_a = jnp.where(mask, after - log_f + log_i, -jnp.inf)
    log_memory = after[:, 0] + m
    new_m = m
    if input_gate == "exp":
        new_m = jnp.maximum(log_memory, jnp.max(log_a, axis=1))
    kept = jnp.exp(log_memory - new_m)
    weighted = jnp.exp(log_a - new_m[:, None])[..., None] * k.astype(jnp.float32)
    weighted = jnp.where(mask[..., None], weighted, 0.0)
    added = jnp.einsum(
        "bthk,bthv->bhkv",
        weighted.astype(v.dtype),
        jnp.where(mask[..., None], v, 0),
        preferred_element_type=jnp.float32,
    )
    new_c = kept[..., None, None] * c.astype(jnp.float32) + added
    new_n = kept[..., None] * n.astype(jnp.float32) + jnp.sum(weighted, axis=1)
    return new_c.astype(c.dtype), new_n.astype(n.dtype), new_m


def all_tokens(
    state: LazyState, tokens: tuple[jax.Array, jax.Array, jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """`(k, v, i, f)` of the slots, used or not, followed by the new tokens."""
    k, v, i, f = (
        jnp.concatenate([old, new.astype(old.dtype)], axis=1)
        for old, new in zip(state[3:], tokens, strict=True)
    )
    return k, v, i, f
