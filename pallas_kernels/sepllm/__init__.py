"""SepLLM: attention to initial tokens, separators and a window of recent tokens."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.arguments import check_arrays, check_implementation, known
from pallas_kernels.sepllm.reference import sepllm_attention_reference
from pallas_kernels.sepllm.visibility import Retention, kv_retention, sepllm_mask
from pallas_kernels.sepllm.xla import sepllm_attention_xla

__all__ = [
    "Retention",
    "kv_retention",
    "sepllm_attention",
    "sepllm_attention_reference",
    "sepllm_mask",
]


def sepllm_attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B T Hk D"],
    value: Float[Array, "B T Hk Dv"],
    is_separator: jax.Array | np.ndarray,
    *,
    window: int | None,
    initial_tokens: int,
    lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    starts: Int[Array, " B"] | None = None,
    separator_capacity: int | None = None,
    scale: float | None = None,
    logit_softcap: float | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T H Dv"]:
    """Causal attention that sees far context through its separators and first tokens only.

    SepLLM (Chen et al., 2025, arXiv:2412.12094, §3.1). Query i sees key j of its segment if
    `j <= i` and j is a separator, one of the segment's first `initial_tokens`, or within the
    window, `i - j < window`, which counts the query itself. No separators gives StreamingLLM's
    mask, a window of T or more full causal attention. Softmax statistics are float32. Time is
    O(T · (window + initial tokens + separators before the query)).

    Args:
      query: `[B, T, H, D]`, floating, rotary embedding applied.
      key: `[B, T, Hk, D]`, likewise; Hk divides H, query head h reads key head `h // (H // Hk)`.
      value: `[B, T, Hk, Dv]`.
      is_separator: bool `[B, T]`; data, so that nothing compiles again for another text.
      window: recent tokens that a query sees, itself included, at least 1; None: all.
      initial_tokens: first tokens of each segment that stay visible; 0 or more.
      lengths: int32 `[B]`, the column at which the right padding of each row begins; None for T.
      segment_ids: int32 `[B, T]` of packed documents, a segment being a run of equal ids; 0 is
        padding.
      starts: int32 `[B]`, the column of each row's first token after its left padding; None for 0.
      separator_capacity: initial tokens and separators of a row, its last window aside, that the
        compact array has room for; where a row has more, the whole is computed with room for all.
        A small one gathers less; memory is reserved for either case. None: room for all.
      scale: of the logits, default `D**-0.5`.
      logit_softcap: c in `c · tanh(logits / c)`, after the scale.
      implementation: None or `"xla"`, which runs everywhere.

    Returns:
      `[B, T, H, Dv]` in query's dtype; zero, with zero gradients, for padding.

    Raises:
      ValueError: an argument has the wrong shape, type or value.
      NotImplementedError: the named implementation does not exist for this operation.
    """
    check_arrays(query, key, value)
    if query.shape[1] != key.shape[1]:
        raise ValueError(
            f"query has {query.shape[1]} tokens and key {key.shape[1]}: they must be the same text"
        )
    check_implementation(implementation)
    batch, time = query.shape[:2]
    _check(window, initial_tokens, separator_capacity, logit_softcap)
    if jnp.shape(is_separator) != (batch, time) or jnp.result_type(is_separator) != jnp.bool_:
        raise ValueError(
            f"is_separator is {jnp.result_type(is_separator)} {jnp.shape(is_separator)}: must be "
            f"bool [batch, time] = {(batch, time)}"
        )
    rows = {"lengths": (lengths, (batch,)), "starts": (starts, (batch,))}
    for name, (x, shape) in (rows | {"segment_ids": (segment_ids, (batch, time))}).items():
        if x is None:
            continue
        if jnp.shape(x) != shape or not jnp.issubdtype(jnp.result_type(x), jnp.integer):
            raise ValueError(
                f"{name} is {jnp.result_type(x)} {jnp.shape(x)}: must be integers {shape}"
            )
        if name != "segment_ids" and known(x):
            values = np.asarray(x)
            if values.min() < 0 or values.max() > time:
                raise ValueError(f"{name}={values.tolist()}: each must be between 0 and {time}")
    lengths, segment_ids, starts = (
        None if x is None else jnp.asarray(x) for x in (lengths, segment_ids, starts)
    )
    return sepllm_attention_xla(
        query,
        key,
        value,
        jnp.asarray(is_separator),
        window=time if window is None else min(int(window), time),
        initial_tokens=int(initial_tokens),
        lengths=lengths,
        segment_ids=segment_ids,
        starts=starts,
        capacity=separator_capacity,
        scale=query.shape[3] ** -0.5 if scale is None else scale,
        logit_softcap=logit_softcap,
    )


def _check(window, initial_tokens, separator_capacity, logit_softcap):
    if window is not None and window < 1:
        raise ValueError(
            f"window={window}: a query must see itself; give at least 1, or None for all"
        )
    if initial_tokens < 0:
        raise ValueError(f"initial_tokens={initial_tokens}: must be 0 or more")
    if separator_capacity is not None and separator_capacity < 1:
        raise ValueError(
            f"separator_capacity={separator_capacity}: must be at least 1, or None for room enough"
        )
    if logit_softcap is not None and not logit_softcap > 0:
        raise ValueError(f"logit_softcap={logit_softcap}: must be positive, or None for no cap")
