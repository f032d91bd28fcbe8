"""sLSTM as one scan over the tokens; the gradients of its parameters are one product after it."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.slstm.reference import State, cell

_product = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


@jax.custom_vjp
def slstm_xla(
    gates: jax.Array,
    recurrent: jax.Array,
    state: State,
    border: jax.Array | None,
    mask: jax.Array | None,
) -> tuple[jax.Array, State]:
    """h `[B, T, H, dh]` and the last state; the bias is part of `gates [B, T, 4, H, dh]`.

    `border`, `mask`: bool `[B, T]`, where a document begins and what is no padding, or None.
    """
    h, last, _ = _forward(gates, recurrent, state, border, mask)
    return h, last


def slstm_states(
    gates: jax.Array, recurrent: jax.Array, state: State, mask: jax.Array | None
) -> tuple[jax.Array, State]:
    """As `slstm_xla` without borders, with the state after each token, `[B, T, H, dh]` each."""
    h, last, met = _forward(gates, recurrent, state, None, mask)
    # What a token met is what the one before left.
    after = (jnp.concatenate([x[1:], end[None]]) for x, end in zip(met, last, strict=True))
    return h, tuple(x.swapaxes(0, 1) for x in after)


def _token(gates, recurrent, state, border, real):
    """h and the next state of one token, and the state it met."""
    if border is not None:
        state = tuple(jnp.where(border[:, None, None], 0, x) for x in state)
    h, c, n, m = state
    met = state
    state = cell(gates + _product("bhd,hdge->bghe", h, recurrent), c, n, m)
    if real is None:
        return state[0], state, met
    keep = real[:, None, None]
    out = jnp.where(keep, state[0], 0)
    return out, tuple(jnp.where(keep, x, old) for x, old in zip(state, met, strict=True)), met


def _by_time(x):
    return None if x is None else x.swapaxes(0, 1)


def _forward(gates, recurrent, state, border, mask):
    def token(state, inputs):
        h, state, met = _token(inputs[0], recurrent, state, *inputs[1:])
        return state, (h, met)

    last, (h, met) = jax.lax.scan(token, state, tuple(map(_by_time, (gates, border, mask))))
    return h.swapaxes(0, 1), last, met


def _slstm_fwd(gates, recurrent, state, border, mask):
    h, last, met = _forward(gates, recurrent, state, border, mask)
    return (h, last), (gates, recurrent, met, border, mask)


def _slstm_bwd(saved, cotangents):
    gates, recurrent, met, border, mask = saved
    d_out, d_last = cotangents

    def token(d_state, inputs):
        gates, (h, c, n, m), border, real, d_out = inputs
        mixed = gates + _product("bhd,hdge->bghe", h, recurrent)
        d_h = d_state[0] + d_out
        d_cell = (d_h, *d_state[1:])
        _, vjp = jax.vjp(lambda gates, c, n: cell(gates, c, n, m), mixed, c, n)
        d_gates, d_c, d_n = vjp(d_cell)
        if real is not None:
            d_gates = jnp.where(real[:, None, None, None], d_gates, 0)
        before = (_product("bghe,hdge->bhd", d_gates, recurrent), d_c, d_n, jnp.zeros_like(m))
        if real is not None:
            keep = real[:, None, None]
            before = tuple(jnp.where(keep, x, old) for x, old in zip(before, d_state, strict=True))
        if border is not None:
            before = tuple(jnp.where(border[:, None, None], 0, x) for x in before)
        return before, d_gates

    inputs = (_by_time(gates), met, _by_time(border), _by_time(mask), _by_time(d_out))
    d_state, d_gates = jax.lax.scan(token, d_last, inputs, reverse=True)
    d_recurrent = _product("tbhd,tbghe->hdge", met[0], d_gates)
    return d_gates.swapaxes(0, 1), d_recurrent, d_state, None, None


slstm_xla.defvjp(_slstm_fwd, _slstm_bwd)
