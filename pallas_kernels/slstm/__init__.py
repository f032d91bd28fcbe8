"""sLSTM: a recurrence whose gates read its last output, one head apart from the other."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.arguments import check_implementation
from pallas_kernels.mlstm.arguments import check_rows
from pallas_kernels.mlstm.borders import document_borders
from pallas_kernels.slstm.reference import slstm_reference
from pallas_kernels.slstm.xla import slstm_states, slstm_xla

__all__ = ["SLSTMState", "slstm", "slstm_reference"]

SLSTMState = tuple[
    Float[Array, "B H dh"], Float[Array, "B H dh"], Float[Array, "B H dh"], Float[Array, "B H dh"]
]


def slstm(
    x_gates: Float[Array, "B T 4 H dh"],
    recurrent: Float[Array, "H dh 4 dh"],
    bias: Float[Array, "H 4 dh"],
    initial_state: SLSTMState | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    *,
    previous_segment: Int[Array, " B"] | None = None,
    mask: Bool[Array, "B T"] | None = None,
    return_state: bool = False,
    return_states: bool = False,
    implementation: str | None = None,
) -> Any:
    """The sLSTM cell over a sequence, token after token: there is no parallel form.

    Beck et al., 2024 (xLSTM, arXiv:2405.04517, section 2.2). For each number of each head, with
    pre-activations `r_g = x_g + (h R)_g + b_g` of g in i, f, z, o and an empty memory at first,

        c = sigmoid(r_f)·c + exp(r_i)·tanh(r_z),   n = sigmoid(r_f)·n + exp(r_i),
        h = sigmoid(r_o)·c / n

    where c and n are kept in units of `exp(m)`, m a running maximum, and a number of the memory is
    empty while its n is 0. States and sums are float32. Gradients are exact; m, given and
    returned, counts as a constant.

    Args:
      x_gates: `[B, T, 4, H, dh]`, floating: what the input contributes to the gates i, f, z, o. T
        is any length >= 1.
      recurrent: `[H, dh, 4, dh]`, floating: R of each head, from h to the gates in that order.
      bias: `[H, 4, dh]`, floating.
      initial_state: `(h, c, n, m)`, each `[B, H, dh]`, of the tokens before. None: zeros.
      segment_ids, previous_segment, mask: as `mlstm`; a document's first token meets a state of
        zeros.
      return_state: whether to return the state after the row's last token too.
      return_states: whether to return the state after each token instead, to go back to one; not
        with segment_ids.
      implementation: None or `"xla"`, which runs everywhere.

    Returns:
      h `[B, T, H, dh]` in the dtype of x_gates; with `return_state` also `(h, c, n, m)`, float32
      (float64 for float64 arrays) whatever that dtype; with `return_states` the same, `[B, T, …]`.

    Raises:
      ValueError: an argument has the wrong shape, type or value.
      NotImplementedError: the named implementation does not exist for this operation.
    """
    _check(x_gates, recurrent, bias, initial_state)
    check_rows(x_gates, segment_ids, previous_segment, mask)
    check_implementation(implementation)
    if return_states and segment_ids is not None:
        raise ValueError("return_states goes without segment_ids: give each document a row")
    batch, _, _, heads, dim = x_gates.shape
    accumulate = jnp.promote_types(x_gates.dtype, jnp.float32)
    if initial_state is None:
        initial_state = (jnp.zeros((batch, heads, dim), accumulate),) * 4
    gates = x_gates.astype(accumulate) + bias.astype(accumulate).swapaxes(0, 1)
    if mask is not None:
        gates = jnp.where(mask[:, :, None, None, None], gates, 0)
    border = document_borders(segment_ids, mask, previous_segment)
    state = tuple(x.astype(accumulate) for x in initial_state)
    if return_states:
        h, states = slstm_states(gates, recurrent.astype(accumulate), state, mask)
        return h.astype(x_gates.dtype), states
    h, state = slstm_xla(gates, recurrent.astype(accumulate), state, border, mask)
    h = h.astype(x_gates.dtype)
    return (h, state) if return_state else h


def _check(x_gates, recurrent, bias, initial_state):
    if x_gates.ndim != 5 or x_gates.shape[2] != 4:
        raise ValueError(
            f"x_gates has shape {x_gates.shape}: must be [batch, time, 4, heads, dim], the gates "
            "being i, f, z, o"
        )
    if 0 in x_gates.shape:
        raise ValueError(
            f"x_gates has shape {x_gates.shape}: every dimension must be at least 1; an empty "
            "sequence has no output, keep the state instead"
        )
    batch, _, _, heads, dim = x_gates.shape
    for name, x, shape, layout in (
        ("recurrent", recurrent, (heads, dim, 4, dim), "[heads, dim, 4, dim]"),
        ("bias", bias, (heads, 4, dim), "[heads, 4, dim]"),
    ):
        if x.shape != shape:
            raise ValueError(f"{name} has shape {x.shape}: must be {layout} = {shape}")
    for name, x in (("x_gates", x_gates), ("recurrent", recurrent), ("bias", bias)):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} has dtype {x.dtype}: must be floating; cast it")
    if initial_state is None:
        return
    if len(initial_state) != 4 or any(x is None for x in initial_state):
        raise ValueError(
            "initial_state must be all four of (h, c, n, m), as `return_state=True` gives them, or "
            "None for an empty memory"
        )
    for name, x in zip("hcnm", initial_state, strict=True):
        if jnp.shape(x) != (batch, heads, dim):
            raise ValueError(
                f"{name} of initial_state has shape {jnp.shape(x)}: must be "
                f"[batch, heads, dim] = {(batch, heads, dim)}"
            )
        if jnp.result_type(x) not in (jnp.float32, jnp.float64):
            raise ValueError(
                f"{name} of initial_state has dtype {jnp.result_type(x)}: must be float32"
            )
