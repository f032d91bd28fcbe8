"""Inputs for attention's tests, and the gradients they compare."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

B, T, S, H, HK, D = 2, 50, 70, 6, 2, 16


def arrays(batch=B, queries=T, keys=S, heads=H, kv_heads=HK, dim=D, dtype=jnp.float32, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((queries, heads), (keys, kv_heads), (keys, kv_heads))
    return tuple(jnp.asarray(rng.normal(size=(batch, time, h, dim)), dtype) for time, h in shapes)


def packed_ids(time, batch=B, seed=1):
    """Sorted segment ids, different in each row, some rows starting with padding (0)."""
    ids = np.random.default_rng(seed).integers(0, 4, (batch, time))
    return jnp.asarray(np.sort(ids, axis=1), jnp.int32)


# Compiling is most of the time of these tests, and this halves it; other tests compile as users do.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def output_and_gradients(function, q, k, v, jit=quick_jit):
    """`(out, dq, dk, dv)` in float32, for a random linear loss on the output."""
    shape = jax.eval_shape(function, q, k, v).shape
    weight = jnp.asarray(np.random.default_rng(7).normal(size=shape), jnp.float32)

    def loss(q, k, v):
        out = function(q, k, v).astype(jnp.float32)
        return jnp.sum(out * weight), out

    (_, out), gradients = jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    return [x.astype(jnp.float32) for x in (out, *gradients)]
