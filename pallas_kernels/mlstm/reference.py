"""mLSTM token by token in float32: what the fast way is tested on."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.mlstm.step import Cell, State, empty_state, log_gates, step


def mlstm_reference(
    q: Float[Array, "B T H dqk"],
    k: Float[Array, "B T H dqk"],
    v: Float[Array, "B T H dv"],
    i: Float[Array, "B T H"],
    f: Float[Array, "B T H"],
    *,
    initial_state: State | None = None,
    previous_segment: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    mask: Bool[Array, "B T"] | None = None,
    eps: float = 1e-6,
    scale: float | None = None,
    input_gate: str = "exp",
    normalize: bool = True,
) -> tuple[Float[Array, "B T H dv"], State]:
    """Arguments as `pallas_kernels.mlstm`, which see; returns h and the state after the row."""
    batch, time, heads, width = k.shape
    accumulate = jnp.promote_types(q.dtype, jnp.float32)
    cell = Cell(eps, width**-0.5 if scale is None else scale, input_gate, normalize)
    empty = empty_state(batch, heads, width, v.shape[-1], accumulate)
    state = empty if initial_state is None else initial_state
    c, n, m = (x.astype(accumulate) for x in state)
    if segment_ids is None:
        segment_ids = jnp.zeros((batch, time), jnp.int32)
    if mask is None:
        mask = jnp.ones((batch, time), bool)
    met = jnp.full(batch, previous_segment is not None)  # whether a token before is known
    segment = jnp.zeros(batch, segment_ids.dtype) if previous_segment is None else previous_segment

    def choose(condition, a, b):
        return jnp.where(condition.reshape(-1, *[1] * (a.ndim - 1)), a, b)

    def token(carry, inputs):
        state, segment, met = carry
        q, k, v, log_i, log_f, new_segment, real = inputs
        border = real & met & (new_segment != segment)
        opened = tuple(choose(border, a, b) for a, b in zip(empty, state, strict=True))
        h, stepped = step(q, k, v, log_i, log_f, opened, cell)
        state = tuple(choose(real, a, b) for a, b in zip(stepped, state, strict=True))
        h = choose(real, h, jnp.zeros_like(h))
        return (state, jnp.where(real, new_segment, segment), met | real), h

    arrays = (*(x.astype(accumulate) for x in (q, k, v)), *log_gates(i, f, input_gate))
    inputs = [x.swapaxes(0, 1) for x in (*arrays, segment_ids, mask)]
    (state, _, _), h = jax.lax.scan(token, ((c, n, m), segment, met), inputs)
    return h.swapaxes(0, 1).astype(q.dtype), state
