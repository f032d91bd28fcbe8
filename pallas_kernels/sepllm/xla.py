"""SepLLM attention in plain XLA operations: the window as a band, the rest compacted.

Almost every block of keys holds a separator, so leaving blocks out saves little. Instead the keys
and values of initial tokens and separators are gathered once into a short array in text order. A
query then sees two intervals, its window of raw tokens and a prefix of its segment's compact
entries, under one softmax; blocks that no query of a block sees cost nothing. Gradients of the
compact array flow back through the gather.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.attention.intervals import Spec, attend
from pallas_kernels.sepllm.visibility import visible


def sepllm_attention_xla(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    is_separator: jax.Array,
    *,
    window: int,
    initial_tokens: int,
    lengths: jax.Array | None,
    segment_ids: jax.Array | None,
    starts: jax.Array | None,
    capacity: int | None,
    scale: float,
    logit_softcap: float | None,
) -> jax.Array:
    """Checked arguments only; see `pallas_kernels.sepllm_attention`."""
    batch, time = is_separator.shape
    room = max(0, time - window)  # tokens that some query has behind its window
    spec = Spec(0, logit_softcap, scale)

    def run(capacity: int) -> tuple[jax.Array, jax.Array]:
        intervals, compact = visible(
            is_separator, window, initial_tokens, lengths, segment_ids, starts, capacity
        )
        if not capacity:
            return attend(query, key, value, None, None, intervals, spec), compact.count
        rows = jnp.arange(batch)[:, None]
        far_key, far_value = key[rows, compact.columns], value[rows, compact.columns]
        return attend(query, key, value, far_key, far_value, intervals, spec), compact.count

    if capacity is None or capacity >= room:
        return run(room)[0]
    _, compact = visible(
        is_separator, window, initial_tokens, lengths, segment_ids, starts, capacity
    )
    return jax.lax.cond(
        jnp.all(compact.count <= capacity), lambda: run(capacity)[0], lambda: run(room)[0]
    )
