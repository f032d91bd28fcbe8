"""Attention to a cache and a new block equals attention to the two written one after the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import attention_reference
from pallas_kernels.attention.cached import cached_attention

SLOTS = 24


def arrays(block, heads, kv_heads, dim=8, batch=3, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(block), 5)
    q = jax.random.normal(keys[0], (batch, block, heads, dim), dtype)
    k, v = (jax.random.normal(key, (batch, block, kv_heads, dim), dtype) for key in keys[1:3])
    cached = [jax.random.normal(key, (batch, SLOTS, kv_heads, dim), dtype) for key in keys[3:]]
    return q, k, v, *cached


@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 4}, {"logit_softcap": 2.0, "scale": 0.7}]
)
@pytest.mark.parametrize(("block", "heads", "kv"), [(1, 4, 2), (1, 3, 3), (5, 6, 2), (3, 4, 1)])
def test_equals_attention_to_the_written_cache(block, heads, kv, options):
    q, k, v, cached_k, cached_v = arrays(block, heads, kv)
    lengths = jnp.asarray([0, 7, SLOTS - block])
    rows = jnp.arange(3)[:, None]
    columns = lengths[:, None] + jnp.arange(block)
    expected = attention_reference(
        q,
        cached_k.at[rows, columns].set(k),
        cached_v.at[rows, columns].set(v),
        q_offset=lengths,
        kv_lengths=lengths + block,
        **options,
    )
    found = cached_attention(q, k, v, cached_k, cached_v, lengths, **options)
    np.testing.assert_allclose(found, expected, atol=2e-6)


def test_slots_beyond_the_length_are_never_read():
    q, k, v, cached_k, cached_v = arrays(2, 4, 2)
    lengths = jnp.asarray([0, 7, 20])
    stale = (jnp.arange(SLOTS) >= lengths[:, None])[..., None, None]
    other = [jnp.where(stale, 1e4, x) for x in (cached_k, cached_v)]
    np.testing.assert_array_equal(
        cached_attention(q, k, v, *other, lengths),
        cached_attention(q, k, v, cached_k, cached_v, lengths),
    )


def test_bfloat16_keeps_its_type_and_float32_statistics():
    q, k, v, cached_k, cached_v = arrays(1, 4, 2, dtype=jnp.bfloat16)
    lengths = jnp.asarray([3, 9, 20])
    found = cached_attention(q, k, v, cached_k, cached_v, lengths)
    exact = cached_attention(
        *(x.astype(jnp.float32) for x in (q, k, v, cached_k, cached_v)), lengths
    )
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(jnp.float32), exact, atol=0.03)
