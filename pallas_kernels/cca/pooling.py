"""Core tokens: each group of tokens pooled into one key and one value."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

POOLINGS = ("cca", "mean", "max")
CORE_HEADS = ("query", "kv")


def pool_groups(
    last_query: Float[Array, "B N H D"],
    group_keys: Float[Array, "B N g Hk D"],
    group_values: Float[Array, "B N g Hk Dv"],
    *,
    pooling: str = "cca",
    core_heads: str = "query",
    scale: float | None = None,
) -> tuple[Float[Array, "B N C D"], Float[Array, "B N C Dv"], Float[Array, "B N C g"] | None]:
    """Pools N complete groups of g tokens; C is H, or Hk for `core_heads="kv"`.

    The core of a group is the mean of its keys, and of its values, weighted by
    `softmax(scale · last_query · key)` over the group (Chen et al., 2025, arXiv:2412.12465,
    section 3.1): the query is that of the group's last token. Keys keep their rotary embedding.

    Args:
      last_query: `[B, N, H, D]`, the query of each group's last token.
      group_keys: `[B, N, g, Hk, D]`.
      group_values: `[B, N, g, Hk, Dv]`.
      pooling: `"cca"` as above, `"mean"`, or `"max"`: elementwise, of keys and of values.
      core_heads: `"query"`: one core for each query head, as in the paper; `"kv"`: one for each
        key head, by the mean of its query heads' logits (not in the paper).
      scale: of the weights' logits, default `D**-0.5`.

    Returns:
      Core keys `[B, N, C, D]` and core values `[B, N, C, Dv]` in the dtypes of keys and values, and
      the float32 weights `[B, N, C, g]`, None for `"max"`.

    Raises:
      ValueError: an argument has the wrong shape or value.
    """
    check_pooling(pooling, core_heads)
    batch, count, heads, head_dim = last_query.shape
    size, kv_heads = group_keys.shape[2:4]
    if heads % kv_heads:
        raise ValueError(
            f"group_keys has {kv_heads} heads: they must divide the {heads} heads of last_query"
        )
    if group_keys.shape[:4] != group_values.shape[:4] or group_keys.shape[:2] != (batch, count):
        raise ValueError(
            f"group_keys {group_keys.shape} and group_values {group_values.shape}: must be "
            f"[batch, groups, group_size, kv_heads, head_dim] with batch and groups {batch, count}"
        )
    repeats = heads // kv_heads
    shared = repeats if core_heads == "query" else 1
    if pooling == "max":
        pooled = (jnp.repeat(x.max(axis=2), shared, axis=2) for x in (group_keys, group_values))
        return *pooled, None
    if pooling == "mean":
        weights = jnp.full((batch, count, kv_heads, shared, size), 1 / size, jnp.float32)
    else:
        scale = head_dim**-0.5 if scale is None else scale
        query = last_query.reshape(batch, count, kv_heads, repeats, head_dim)
        logits = scale * _product("bnkrd,bngkd->bnkrg", query, group_keys)
        if core_heads == "kv":
            logits = logits.mean(axis=3, keepdims=True)
        weights = jax.nn.softmax(logits, axis=-1)
    core_key = _product("bnkrg,bngkd->bnkrd", weights, group_keys.astype(jnp.float32))
    core_value = _product("bnkrg,bngkd->bnkrd", weights, group_values.astype(jnp.float32))
    cores = kv_heads * shared
    return (
        core_key.astype(group_keys.dtype).reshape(batch, count, cores, head_dim),
        core_value.astype(group_values.dtype).reshape(batch, count, cores, -1),
        weights.reshape(batch, count, cores, size),
    )


def check_pooling(pooling: str, core_heads: str) -> None:
    """Both are names this module knows."""
    if pooling not in POOLINGS:
        raise ValueError(f"pooling={pooling!r}: must be one of {POOLINGS}")
    if core_heads not in CORE_HEADS:
        raise ValueError(f"core_heads={core_heads!r}: must be one of {CORE_HEADS}")


def _product(equation, a, b):
    return jnp.einsum(
        equation, a, b, preferred_element_type=jnp.float32, precision=jax.lax.Precision.HIGHEST
    )


# The weights are computed again for the backward pass rather than kept.
@functools.partial(jax.checkpoint, static_argnums=(4, 5, 6, 7, 8))
def cores_of_row(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    core_ends: jax.Array | None,
    count: int,
    group_size: int,
    pooling: str,
    core_heads: str,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """Core keys and values `[B, count, C, D]` of the groups that end at columns `core_ends`."""
    last_query, keys, values = groups_of_row(query, key, value, core_ends, count, group_size)
    core_key, core_value, _ = pool_groups(
        last_query, keys, values, pooling=pooling, core_heads=core_heads, scale=scale
    )
    return core_key, core_value


def groups_of_row(query, key, value, core_ends, count, group_size):
    """Arguments of `pool_groups`, gathered; `core_ends` `[B, count]` as of `visible`, or None."""
    if core_ends is None:
        rows = count * group_size

        def grouped(x):
            return x[:, :rows].reshape(x.shape[0], count, group_size, *x.shape[2:])

        return query[:, group_size - 1 : rows : group_size], grouped(key), grouped(value)
    batch = jnp.arange(query.shape[0])
    member = jnp.maximum(core_ends[:, :, None] + jnp.arange(1 - group_size, 1), 0)
    return (
        query[batch[:, None], core_ends],
        key[batch[:, None, None], member],
        value[batch[:, None, None], member],
    )
