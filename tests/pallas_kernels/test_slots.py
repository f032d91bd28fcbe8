"""Attention over several sets of slots under one softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention.slots import CHUNK, Slots, attention_over_slots


def random_set(key, slots, heads, filled=None):
    keys = jax.random.split(key, 3)
    shape = (2, slots, heads, 8)
    visible = jax.random.bernoulli(keys[2], 0.5, (2, 3, slots))
    if filled is not None:
        visible &= jnp.arange(slots) < filled
        filled = jnp.int32(filled)
    return Slots(
        jax.random.normal(keys[0], shape), jax.random.normal(keys[1], shape), visible, filled
    )


def expected(query, sets, softcap):
    group = [query.shape[2] // slots.key.shape[2] for slots in sets]
    key, value = (
        jnp.concatenate([jnp.repeat(x, g, 2) for x, g in zip(arrays, group, strict=True)], 1)
        for arrays in ([s.key for s in sets], [s.value for s in sets])
    )
    logits = jnp.einsum("bthd,bshd->bhts", query, key) * 8**-0.5
    if softcap:
        logits = softcap * jnp.tanh(logits / softcap)
    seen = jnp.concatenate([s.visible for s in sets], -1)[:, None]
    weights = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf))
    return jnp.einsum("bhts,bshd->bthd", weights, value)


@pytest.mark.parametrize("heads", [4, 32])  # few rows, and many
@pytest.mark.parametrize("filled", [0, 3, CHUNK, CHUNK + 20, CHUNK + 60])
def test_equals_one_softmax_over_everything(heads, filled):
    keys = jax.random.split(jax.random.key(filled), 4)
    query = jax.random.normal(keys[0], (2, 3, heads, 8))
    sets = [
        random_set(keys[1], CHUNK + 60, heads // 2, filled),
        random_set(keys[2], 7, heads),
        random_set(keys[3], 3, 2)._replace(visible=jnp.broadcast_to(jnp.tri(3) > 0, (2, 3, 3))),
    ]
    softcap = 5.0 if filled == 3 else None
    got = jax.jit(lambda q, s: attention_over_slots(q, s, logit_softcap=softcap))(query, sets)
    np.testing.assert_allclose(got, expected(query, sets, softcap), atol=2e-6)
