"""Arguments of the mLSTM tests, and how errors are counted in them."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.mlstm import mlstm, mlstm_reference

STATIC = ("input_gate", "normalize")
xla = jax.jit(mlstm, static_argnames=(*STATIC, "chunk_size", "return_state"))
reference = jax.jit(mlstm_reference, static_argnames=STATIC)


def error(x, expected) -> float:
    """The largest difference, as a share of the largest expected value."""
    x, expected = (np.asarray(a, np.float64) for a in (x, expected))
    assert np.isfinite(x).all()
    return float(np.abs(x - expected).max() / max(np.abs(expected).max(), 1e-30))


def row(seed, time, batch=2, heads=2, dqk=8, dv=16, gates=3.0, dtype=np.float32):
    """`(q, k, v, i, f)`, gates uniform over ±`gates`."""
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, batch, time, heads, dqk))
    v = rng.normal(size=(batch, time, heads, dv))
    i, f = rng.uniform(-gates, gates, size=(2, batch, time, heads))
    return tuple(jnp.asarray(x, dtype) for x in (q, k, v, i, f))


def memory(seed, batch=2, heads=2, dqk=8, dv=16):
    """A state `(c, n, m)` that is not empty."""
    rng = np.random.default_rng(seed + 1000)
    c = rng.normal(size=(batch, heads, dqk, dv))
    n = rng.normal(size=(batch, heads, dqk))
    m = rng.uniform(-1, 2, size=(batch, heads))
    return tuple(jnp.asarray(x, np.float32) for x in (c, n, m))


def rows(tree, *index):
    """The same rows, or columns of them, of every array."""
    return tuple(x[index] for x in tree)
