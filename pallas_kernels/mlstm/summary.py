"""What a stretch of tokens does to the memory, in a form that composes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.mlstm.arguments import check_gates, check_rows, check_tokens
from pallas_kernels.mlstm.borders import document_borders
from pallas_kernels.mlstm.step import State, log_gates


class MLSTMSummary(NamedTuple):
    """A stretch of tokens as a map of the memory: decay what was there, then add what was written.

    Attributes:
      g: float32 `[B, H]`, the logarithm of the stretch's decay: the sum of its log forget gates,
        -inf if a document begins in it.
      m: float32 `[B, H]`, the logarithm of the unit of c and n; -inf if nothing was written.
      c: float32 `[B, H, dqk, dv]`; `exp(m) * c` is what the stretch writes to the memory.
      n: float32 `[B, H, dqk]`, likewise of the normaliser.
    """

    g: Float[Array, "B H"]
    m: Float[Array, "B H"]
    c: Float[Array, "B H dqk dv"]
    n: Float[Array, "B H dqk"]

    @property
    def state(self) -> State:
        """`(c, n, m)`: the state after the stretch, if it began with the first token of all."""
        return self.c, self.n, self.m

    @classmethod
    def of_state(cls, state: State) -> "MLSTMSummary":
        """The stretch that leads to a state: `mlstm_compose` it with what follows."""
        c, n, m = state
        return cls(jnp.zeros_like(m), m, c, n)


def mlstm_summary(
    k: Float[Array, "B T H dqk"],
    v: Float[Array, "B T H dv"],
    i: Float[Array, "B T H"],
    f: Float[Array, "B T H"],
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    previous_segment: Int[Array, " B"] | None = None,
    mask: Bool[Array, "B T"] | None = None,
    input_gate: str = "exp",
) -> MLSTMSummary:
    """The summary of a stretch of tokens, all at once and in memory linear in their number.

    Devices that hold consecutive stretches of a row need one summary of each other's, no tokens:
    the state before a stretch is the composition of those before it (Beck et al., 2025,
    arXiv:2503.14376). Differentiable in the four arrays; m counts as a constant, as in `mlstm`.

    Args:
      k, v, i, f: as `mlstm`.
      segment_ids, mask: as `mlstm`.
      previous_segment: int32 `[B]`, the id of the token before the stretch. None: there is none, or
        it is of the first token's document.
      input_gate: as `mlstm`.

    Raises:
      ValueError: an argument has the wrong shape, type or value.
    """
    check_tokens(k=k, v=v)
    check_gates(k, i, f, input_gate)
    check_rows(k, segment_ids, previous_segment, mask)
    log_i, log_f = log_gates(i, f, input_gate, mask)
    border = document_borders(segment_ids, mask, previous_segment)
    if mask is not None:
        k, v = (jnp.where(mask[..., None, None], x, 0) for x in (k, v))
    # Each token decays by the forget gates after it.
    decay = jax.lax.cumsum(log_f, axis=1, reverse=True)
    after = jnp.pad(decay[:, 1:], ((0, 0), (0, 1), (0, 0)))
    g, weight = decay[:, 0], after + log_i
    m = jnp.max(weight, axis=1)
    if border is not None:
        count = jax.lax.cumsum(border.astype(jnp.int32), axis=1, reverse=True)
        last_document = (count - border == 0)[..., None]
        weight = jnp.where(last_document, weight, -jnp.inf)
        # The last document began with an empty memory, whose m is 0.
        opened = jnp.max(jnp.where(last_document & border[..., None], decay, -jnp.inf), axis=1)
        m = jnp.maximum(jnp.max(weight, axis=1), opened)
        g = jnp.where(count[:, :1] > 0, -jnp.inf, g)
    m = jnp.zeros_like(m) if input_gate == "sigmoid" else jax.lax.stop_gradient(m)
    weight = jnp.exp(weight - _finite(m)[:, None])
    k, v = k.astype(weight.dtype), v.astype(weight.dtype)
    written = weight[..., None] * k
    c = jnp.einsum("bthk,bthv->bhkv", written, v, precision=jax.lax.Precision.HIGHEST)
    return MLSTMSummary(g, m, c, written.sum(1))


def mlstm_compose(first: MLSTMSummary, second: MLSTMSummary) -> MLSTMSummary:
    """The summary of two stretches, the second following the first. Associative.

    Fits `jax.lax.associative_scan`: leading axes are free as long as both have the same.
    """
    m1, m2 = jax.lax.stop_gradient((first.m, second.m))
    m = jnp.maximum(jax.lax.stop_gradient(second.g) + m1, m2)
    keep, write = jnp.exp(second.g + m1 - _finite(m)), jnp.exp(m2 - _finite(m))
    return MLSTMSummary(
        first.g + second.g,
        m,
        keep[..., None, None] * first.c + write[..., None, None] * second.c,
        keep[..., None] * first.n + write[..., None] * second.n,
    )


def _finite(m):
    """The same unit where something was written; any other (1) where nothing was."""
    return jnp.where(m == -jnp.inf, 0.0, m)
