"""One token of the mLSTM recurrence, and its gates."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

State = tuple[jax.Array, jax.Array, jax.Array]


class Cell(NamedTuple):
    """What is known of the cell when tracing."""

    eps: float
    scale: float
    input_gate: str
    normalize: bool


def empty_state(batch: int, heads: int, dqk: int, dv: int, dtype) -> State:
    """All zeros, m too: the memory before a document's first token."""
    return (
        jnp.zeros((batch, heads, dqk, dv), dtype),
        jnp.zeros((batch, heads, dqk), dtype),
        jnp.zeros((batch, heads), dtype),
    )


def log_gates(
    i: jax.Array, f: jax.Array, input_gate: str, mask: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Logarithms of the input and the forget gate, at least float32, of their pre-activations.

    Where `mask [B, T]` is False nothing is written (-inf) and nothing forgotten (0).
    """
    i, f = (x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in (i, f))
    if mask is not None:  # first of all: the gradient of a NaN is one even where it is not used
        i, f = (jnp.where(mask[..., None], x, 0) for x in (i, f))
    log_i, log_f = (i if input_gate == "exp" else jax.nn.log_sigmoid(i)), jax.nn.log_sigmoid(f)
    if mask is not None:
        log_i = jnp.where(mask[..., None], log_i, -jnp.inf)
        log_f = jnp.where(mask[..., None], log_f, 0.0)
    return log_i, log_f


def step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_i: jax.Array,
    log_f: jax.Array,
    state: State,
    cell: Cell,
) -> tuple[jax.Array, State]:
    """`h [..., dv]` and the next state, of `q, k [..., dqk]`, `v [..., dv]`, gates `[...]`."""
    c, n, m = state
    # m is a gauge: outputs do not depend on it, so no gradient goes through it.
    m = jax.lax.stop_gradient(m)
    next_m = m
    if cell.input_gate == "exp":
        next_m = jnp.maximum(jax.lax.stop_gradient(log_f) + m, jax.lax.stop_gradient(log_i))
    # Only memory that nothing was ever written to has m = -inf.
    base = jnp.where(next_m == -jnp.inf, 0.0, next_m)
    forget, write = jnp.exp(log_f + m - base), jnp.exp(log_i - base)
    c = forget[..., None, None] * c + (write[..., None] * k)[..., :, None] * v[..., None, :]
    n = forget[..., None] * n + write[..., None] * k
    numerator = cell.scale * jnp.einsum(
        "...k,...kv->...v", q, c, precision=jax.lax.Precision.HIGHEST
    )
    if not cell.normalize:
        return numerator, (c, n, next_m)
    denominator = jnp.abs(cell.scale * jnp.sum(q * n, axis=-1))
    denominator = jnp.maximum(denominator, jnp.exp(-base)) + cell.eps
    return numerator / denominator[..., None], (c, n, next_m)
