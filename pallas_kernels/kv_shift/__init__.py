"""KV shifting: each key or value becomes a learned mix of itself and of the tokens before it."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.kv_shift.reference import kv_shift_reference
from pallas_kernels.kv_shift.xla import raw_tail, shifted

__all__ = ["kv_shift", "kv_shift_reference"]


def kv_shift(
    x: Float[Array, "B T Hk D"],
    weights: Float[Array, "Hk W"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    lengths: Int[Array, " B"] | None = None,
    initial: Float[Array, "B W-1 Hk D"] | None = None,
    return_tail: bool = False,
) -> Float[Array, "B T Hk D"] | tuple[Float[Array, "B T Hk D"], Float[Array, "B W-1 Hk D"]]:
    """`y[t] = sum_u weights[:, u] · x[t - (W - 1) + u]`, per key head: the oldest tap comes first.

    KV Shifting Attention (Xu et al., 2025, arXiv:2411.19574, section 3) applies it with W = 2 to
    keys and to values between their projections and the rotary embedding. The tokens before a
    row's first are those of `initial`, else zero, and nothing is renormalised. Weights
    `[0, …, 0, 1]` give x back bit by bit. Products and sums are float32, also those of the
    gradients.

    Args:
      x: `[B, T, Hk, D]`, floating: keys or values, not yet rotated.
      weights: `[Hk, W]`, floating, W >= 1: for W = 2 `[previous, current]` of each key head.
      segment_ids: int32 `[B, T]`. No token takes from another segment, or from beyond a token of
        another segment; 0, the padding of packed rows, is an id like any other. Left padding is
        this with ids 0, …, 0, 1, …, 1.
      lengths: int32 `[B]`, the number of tokens of each row before its right padding, which the
        tail leaves out. None: T. Outputs do not depend on it.
      initial: `[B, W - 1, Hk, D]`, the tail of the tokens before x, of the segment of each row's
        first token. None: zeros.
      return_tail: whether to return the tail too.

    Returns:
      `[B, T, Hk, D]` in x's dtype; with `return_tail`, also the last W - 1 raw tokens of each row
      `[B, W - 1, Hk, D]`: the `initial` of the tokens that follow. It is zero where they are not
      of the segment of the row's last token.

    Raises:
      ValueError: an argument has the wrong shape or type.
    """
    _check(x, weights, segment_ids, lengths, initial)
    batch, _, heads, head_dim = x.shape
    past = weights.shape[1] - 1
    if initial is None:
        initial = jnp.zeros((batch, past, heads, head_dim), x.dtype)
    tokens = jnp.concatenate([initial.astype(x.dtype), x], axis=1)
    if segment_ids is not None:
        first = jnp.broadcast_to(segment_ids[:, :1], (batch, past))
        segment_ids = jnp.concatenate([first, segment_ids], axis=1)
    out = shifted(tokens, weights, segment_ids)
    if not return_tail:
        return out
    return out, raw_tail(tokens, past, segment_ids, lengths)


def _check(x, weights, segment_ids, lengths, initial):
    if x.ndim != 4:
        raise ValueError(
            f"x has shape {x.shape}: must be [batch, time, kv_heads, head_dim], 4 dimensions"
        )
    batch, time, heads, head_dim = x.shape
    if weights.ndim != 2 or weights.shape[0] != heads:
        raise ValueError(
            f"weights has shape {weights.shape}: must be [kv_heads, window] = ({heads}, window), "
            "one row for each head of x (for each key head, not for each query head)"
        )
    window = weights.shape[1]
    if window < 1:
        raise ValueError(f"weights has window {window}: must be at least 1, the token itself")
    for name, array in (("x", x), ("weights", weights), ("initial", initial)):
        if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
            raise ValueError(f"{name} has dtype {array.dtype}: must be floating; cast it")
    if initial is not None and initial.shape != (batch, window - 1, heads, head_dim):
        raise ValueError(
            f"initial has shape {initial.shape}: must be [batch, window - 1, kv_heads, head_dim] = "
            f"{(batch, window - 1, heads, head_dim)}, the raw tail of the tokens before"
        )
    for name, ids, shape in (
        ("segment_ids", segment_ids, (batch, time)),
        ("lengths", lengths, (batch,)),
    ):
        if ids is None:
            continue
        if jnp.shape(ids) != shape:
            raise ValueError(f"{name} has shape {jnp.shape(ids)}: must be {shape}")
        if not jnp.issubdtype(jnp.result_type(ids), jnp.integer):
            raise ValueError(f"{name} has dtype {jnp.result_type(ids)}: must be an integer type")
