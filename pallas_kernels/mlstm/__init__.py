"""mLSTM: a recurrence with a matrix as memory, computed over whole sequences or token by token."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.arguments import check_implementation
from pallas_kernels.mlstm.arguments import (
    check_chunk_size,
    check_gates,
    check_options,
    check_rows,
    check_state,
    check_tokens,
)
from pallas_kernels.mlstm.borders import document_borders
from pallas_kernels.mlstm.reference import mlstm_reference
from pallas_kernels.mlstm.step import Cell, empty_state, log_gates, step
from pallas_kernels.mlstm.summary import MLSTMSummary, mlstm_compose, mlstm_summary
from pallas_kernels.mlstm.xla import Spec, Tokens, default_chunk_size, mlstm_xla

__all__ = [
    "MLSTMState",
    "MLSTMSummary",
    "mlstm",
    "mlstm_compose",
    "mlstm_reference",
    "mlstm_step",
    "mlstm_summary",
]

MLSTMState = tuple[Float[Array, "B H dqk dv"], Float[Array, "B H dqk"], Float[Array, "B H"]]


def mlstm(
    q: Float[Array, "B T H dqk"],
    k: Float[Array, "B T H dqk"],
    v: Float[Array, "B T H dv"],
    i: Float[Array, "B T H"],
    f: Float[Array, "B T H"],
    *,
    initial_state: MLSTMState | None = None,
    previous_segment: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    mask: Bool[Array, "B T"] | None = None,
    chunk_size: int | None = None,
    eps: float = 1e-6,
    scale: float | None = None,
    input_gate: str = "exp",
    normalize: bool = True,
    return_state: bool = False,
    implementation: str | None = None,
) -> Float[Array, "B T H dv"] | tuple[Float[Array, "B T H dv"], MLSTMState]:
    """The mLSTM cell over a sequence: linear time, a state of fixed size.

    Beck et al., 2025 (xLSTM 7B, arXiv:2503.13427, section 3; tiled, arXiv:2503.14376). With the
    forget gate `F = sigmoid(f)`, the input gate `I = exp(i)` and an empty memory at first,

        C = F·C + I·k vᵀ,   n = F·n + I·k,   h = scale·qᵀC / max(|scale·q·n|, 1)

    for each token and head. The state is kept as `c = C·exp(-m)`, `n·exp(-m)` with a running
    maximum m, which bounds every exponential; `eps` is added to the denominator in those units.
    Neither the chunk size nor where a sequence is cut changes h or the state.

    Gradients are exact, the normaliser's and those through both states included, for what does not
    depend on the units of the state: m, given and returned, counts as a constant, and only `eps`
    notices.

    Args:
      q, k: `[B, T, H, dqk]`, floating; q is scaled, k and the state are not. T is any length >= 1.
      v: `[B, T, H, dv]`, floating.
      i, f: `[B, T, H]`, floating: gates before exp and sigmoid, after any soft cap.
      initial_state: `(c [B, H, dqk, dv], n [B, H, dqk], m [B, H])` of the tokens before, as
        `return_state` gives it. None: zeros.
      previous_segment: int32 `[B]`, the id of the token that `initial_state` ends with. None: the
        id of the row's first token, whose document goes on. To cut packed rows anywhere, give
        `segment_ids[:, cut - 1]` (of the last token that is no padding) with the second part.
      segment_ids: int32 `[B, T]`. Where a token's id is not that of the token before it, a document
        begins, exactly as in a row of its own with no initial state. 0 is an id like any other.
      mask: bool `[B, T]`, False for padding, anywhere in a row: it leaves state and other outputs
        as if it were not there, whatever it holds. Its own h is zero and its id does not matter.
      chunk_size: tokens computed as one block; memory is linear in T for any. None: the fastest
        measured.
      eps: added to the denominator.
      scale: of q, default `dqk**-0.5`.
      input_gate: `"exp"`, or `"sigmoid"` for mLSTMsig (arXiv:2503.14376): `I = sigmoid(i)` and m is
        always 0.
      normalize: whether to divide; only mLSTMsig can do without.
      return_state: whether to return the state after the row's last token too.
      implementation: None or `"xla"`, which runs everywhere.

    Returns:
      h `[B, T, H, dv]` in q's dtype; with `return_state` also `(c, n, m)`, float32 (float64 for
      float64 arrays) whatever the dtype of q.

    Raises:
      ValueError: an argument has the wrong shape, type or value.
      NotImplementedError: the named implementation does not exist for this operation.
    """
    check_tokens(q=q, k=k, v=v)
    check_gates(k, i, f, input_gate)
    check_options(input_gate, normalize, eps)
    check_rows(k, segment_ids, previous_segment, mask)
    check_chunk_size(chunk_size)
    if initial_state is not None:
        check_state(k, v, initial_state)
    check_implementation(implementation)
    batch, time, heads, width = k.shape
    accumulate = jnp.promote_types(q.dtype, jnp.float32)
    log_i, log_f = log_gates(i, f, input_gate, mask)
    border = document_borders(segment_ids, mask, previous_segment)
    # Padding may hold NaN, which a product with zero would not remove.
    query, key, value = (q, k, v) if mask is None else _without_padding(mask, q, k, v)
    log_i, log_f = log_i.astype(accumulate), log_f.astype(accumulate)
    tokens = Tokens(query, key, value, log_i, log_f, border)
    if initial_state is None:
        state = empty_state(batch, heads, width, v.shape[-1], accumulate)
    else:
        c, n, m = initial_state
        state = (c.astype(accumulate), n.astype(accumulate), m.astype(accumulate))
    exact = jnp.finfo(q.dtype).bits >= 32
    spec = Spec(
        Cell(eps, width**-0.5 if scale is None else scale, input_gate, normalize),
        default_chunk_size(time) if chunk_size is None else min(chunk_size, time),
        jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT,
    )
    h, state = mlstm_xla(tokens, state, spec)
    h = h.astype(q.dtype)
    if mask is not None:
        (h,) = _without_padding(mask, h)
    return (h, state) if return_state else h


def mlstm_step(
    q: Float[Array, "B H dqk"],
    k: Float[Array, "B H dqk"],
    v: Float[Array, "B H dv"],
    i: Float[Array, "B H"],
    f: Float[Array, "B H"],
    state: MLSTMState,
    *,
    eps: float = 1e-6,
    scale: float | None = None,
    input_gate: str = "exp",
    normalize: bool = True,
) -> tuple[Float[Array, "B H dv"], MLSTMState]:
    """One token of `mlstm`: its h and the next state.

    A row with `i = -inf` and `f = inf` keeps its state. An empty memory is all zeros, m too.

    Args:
      q, k, v, i, f: one token of each row, else as `mlstm`.
      state: `(c [B, H, dqk, dv], n [B, H, dqk], m [B, H])`, as `mlstm` gives it.
      eps, scale, input_gate, normalize: as `mlstm`.

    Returns:
      h `[B, H, dv]` in q's dtype, and `(c, n, m)` in the dtypes of `state`.

    Raises:
      ValueError: an argument has the wrong shape, type or value.
    """
    check_tokens(q=q, k=k, v=v, ndim=3)
    check_gates(k, i, f, input_gate)
    check_options(input_gate, normalize, eps)
    check_state(k, v, state)
    accumulate = jnp.promote_types(q.dtype, jnp.float32)
    query, key, value, c, n, m = (x.astype(accumulate) for x in (q, k, v, *state))
    cell = Cell(eps, k.shape[-1] ** -0.5 if scale is None else scale, input_gate, normalize)
    h, next_state = step(query, key, value, *log_gates(i, f, input_gate), (c, n, m), cell)
    c, n, m = (x.astype(old.dtype) for x, old in zip(next_state, state, strict=True))
    return h.astype(q.dtype), (c, n, m)


def _without_padding(mask, *arrays):
    return tuple(jnp.where(mask[..., None, None], x, 0) for x in arrays)
