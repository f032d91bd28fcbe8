"""sLSTM token by token in float32: what the fast way is tested on."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

State = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


def cell(gates: jax.Array, c: jax.Array, n: jax.Array, m: jax.Array) -> State:
    """The next `(h, c, n, m)`, each `[B, H, dh]`, of pre-activations `[B, 4, H, dh]` (i, f, z, o).

    c and n are kept in units of exp(m), which cancel in h, so m counts as a constant.
    """
    i, f, z, o = jnp.moveaxis(gates, 1, 0)
    log_f = jax.nn.log_sigmoid(f)
    empty = n == 0
    m = jax.lax.stop_gradient(jnp.where(empty, -jnp.inf, m))
    next_m = jax.lax.stop_gradient(jnp.maximum(log_f + m, i))
    forget, write = jnp.exp(log_f + m - next_m), jnp.exp(i - next_m)
    c = forget * c + write * jnp.tanh(z)
    n = forget * n + write
    return jax.nn.sigmoid(o) * c / n, c, n, next_m


def slstm_reference(
    x_gates: Float[Array, "B T 4 H dh"],
    recurrent: Float[Array, "H dh 4 dh"],
    bias: Float[Array, "H 4 dh"],
    *,
    initial_state: State | None = None,
    previous_segment: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    mask: Bool[Array, "B T"] | None = None,
) -> tuple[Float[Array, "B T H dh"], State]:
    """Arguments as `pallas_kernels.slstm`, which see; returns h and the state after the row."""
    batch, time, _, heads, dim = x_gates.shape
    accumulate = jnp.promote_types(x_gates.dtype, jnp.float32)
    gates, recurrent, bias = (x.astype(accumulate) for x in (x_gates, recurrent, bias))
    empty = jnp.zeros((batch, heads, dim), accumulate)
    state = tuple(x.astype(accumulate) for x in initial_state or (empty,) * 4)
    rows = []
    # The id of the last real token, None before there is one.
    last = [None if previous_segment is None else previous_segment[b] for b in range(batch)]
    for t in range(time):
        outputs = []
        for b in range(batch):
            row = tuple(x[b : b + 1] for x in state)
            real = mask is None or bool(mask[b, t])
            if real:
                segment = 0 if segment_ids is None else segment_ids[b, t]
                if last[b] is not None and last[b] != segment:
                    row = (empty[:1],) * 4
                last[b] = segment
                mixed = jnp.einsum(
                    "bhd,hdge->bghe", row[0], recurrent, precision=jax.lax.Precision.HIGHEST
                )
                row = cell(gates[b : b + 1, t] + mixed + bias.swapaxes(0, 1), *row[1:])
            outputs.append((row[0] if real else empty[:1], row))
        rows.append(jnp.concatenate([h for h, _ in outputs]))
        state = tuple(jnp.concatenate(x) for x in zip(*(row for _, row in outputs), strict=True))
    return jnp.stack(rows, axis=1).astype(x_gates.dtype), state
