"""Core context aware attention: one pooled token for each group of far ones."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.arguments import check_arrays, check_implementation
from pallas_kernels.attention.intervals import Spec, attend
from pallas_kernels.cca.pooling import check_pooling, cores_of_row, groups_of_row, pool_groups
from pallas_kernels.cca.reference import cca_attention_reference
from pallas_kernels.cca.visibility import cca_mask, max_visible_cores, visible

__all__ = ["cca_attention", "cca_attention_reference", "cca_mask", "core_tokens", "pool_groups"]


def cca_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B T Hk D"],
    value: Float[Array, "B T Hk Dv"],
    *,
    group_size: int,
    window_size: int,
    pooling: str = "cca",
    sink_tokens: int = 0,
    core_heads: str = "query",
    scale: float | None = None,
    logit_softcap: float | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    lengths: Int[Array, " B"] | None = None,
    starts: Int[Array, " B"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T H Dv"]:
    """Causal attention that sees far context through one pooled token per group.

    Core Context Aware attention (Chen et al., 2025, arXiv:2412.12465). With g = `group_size` and
    s = `window_size`, token t of a segment (from 0) sees the cores of its first
    `j = max(0, (t + 1 - s) // g)` groups and the raw tokens `g·j, …, t`, in one softmax: every
    token up to t once, the last s or more raw. A core is a group's keys and values averaged by the
    attention of its last query (`core_tokens`), and counts as one token. With `g = 1`, and up to
    `T < s + g`, this is full causal attention. Softmax statistics are float32, cores have the dtype
    of keys and values. Time is O(T·(s + T/g)); no array has more than O(T) elements per head.
    Differentiable in all three arrays, through the cores and their weights too.

    Groups count from the first token of each segment, after left padding; none crosses a border.

    Args:
      query: `[B, T, H, D]`, floating, rotary embedding applied.
      key: `[B, T, Hk, D]`, likewise; Hk divides H, query head h reads key head `h // (H // Hk)`.
      value: `[B, T, Hk, Dv]`.
      group_size: g, tokens in a group; at least 1.
      window_size: s, how many tokens a query sees raw at least; at least 1.
      pooling: `"cca"`, `"mean"` or `"max"`, see `core_tokens`.
      sink_tokens: first tokens of each segment that later queries see raw besides their core; 0 is
        the paper's. Repairs most of what untrained models lose.
      core_heads: `"query"` (the paper's) or `"kv"`, see `core_tokens`.
      scale: of the logits and of those of the pooling weights, default `D**-0.5`.
      logit_softcap: c in `c · tanh(logits / c)`, after the scale; the pooling weights have none.
      segment_ids: int32 `[B, T]`; a segment is a run of equal ids, 0 being an id like any other.
      lengths: int32 `[B]`, the column at which the right padding of each row begins; None for T.
      starts: int32 `[B]`, the column of each row's first token after its left padding; None for 0.
      implementation: None or `"xla"`, which runs everywhere.

    Returns:
      `[B, T, H, Dv]` in query's dtype; zero for padding by `lengths` or `starts`.

    Raises:
      ValueError: an argument has the wrong shape, type or value.
      NotImplementedError: the named implementation does not exist for this operation.
    """
    check_arrays(query, key, value)
    _check(query, key, group_size, window_size, sink_tokens, logit_softcap)
    _check_rows(query, segment_ids=segment_ids, lengths=lengths, starts=starts)
    check_pooling(pooling, core_heads)
    check_implementation(implementation)
    time, head_dim = query.shape[1], query.shape[3]
    scale = head_dim**-0.5 if scale is None else scale
    seen, core_ends = visible(time, group_size, window_size, segment_ids, lengths, starts)
    count = max_visible_cores(time, group_size, window_size)
    core_key = core_value = None
    if count:
        core_key, core_value = cores_of_row(
            query, key, value, core_ends, count, group_size, pooling, core_heads, scale
        )
    spec = Spec(sink_tokens, logit_softcap, scale)
    return attend(query, key, value, core_key, core_value, seen, spec)


def core_tokens(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B T Hk D"],
    value: Float[Array, "B T Hk Dv"],
    *,
    group_size: int,
    pooling: str = "cca",
    core_heads: str = "query",
    scale: float | None = None,
) -> tuple[Float[Array, "B N C D"], Float[Array, "B N C Dv"], Float[Array, "B N C g"] | None]:
    """Core keys, core values and pooling weights of the `N = T // group_size` complete groups.

    Group n is the tokens `n·g, …, n·g + g - 1`; for C, the rest of the arguments, the results and
    errors see `pool_groups`, and `cca_attention` for the shapes.
    """
    check_arrays(query, key, value)
    _check(query, key, group_size)
    count = query.shape[1] // group_size
    return pool_groups(
        *groups_of_row(query, key, value, None, count, group_size),
        pooling=pooling,
        core_heads=core_heads,
        scale=scale,
    )


def _check(query, key, group_size, window_size=1, sink_tokens=0, logit_softcap=None):
    if key.shape[1] != query.shape[1]:
        raise ValueError(
            f"key has {key.shape[1]} tokens, query {query.shape[1]}: must be equal; groups are of "
            "the same tokens"
        )
    for name, size, least in (
        ("group_size", group_size, 1),
        ("window_size", window_size, 1),
        ("sink_tokens", sink_tokens, 0),
    ):
        if size < least:
            raise ValueError(f"{name}={size}: must be at least {least}")
    if logit_softcap is not None and not logit_softcap > 0:
        raise ValueError(f"logit_softcap={logit_softcap}: must be positive, or None for no cap")


def _check_rows(query, *, segment_ids, lengths, starts):
    batch, time = query.shape[:2]
    for name, x, shape in (
        ("segment_ids", segment_ids, (batch, time)),
        ("lengths", lengths, (batch,)),
        ("starts", starts, (batch,)),
    ):
        if x is None:
            continue
        if jnp.shape(x) != shape:
            raise ValueError(f"{name} has shape {jnp.shape(x)}: must be {shape}")
        if not jnp.issubdtype(jnp.result_type(x), jnp.integer):
            raise ValueError(f"{name} has dtype {jnp.result_type(x)}: must be an integer type")
