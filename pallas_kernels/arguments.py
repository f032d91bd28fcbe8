"""Argument checks the block-sparse operations share; all before any array work."""

import math

import jax
import jax.numpy as jnp
import numpy as np

IMPLEMENTATIONS = ("xla", "pallas", "triton")


def known(x) -> bool:
    """Whether the values of an array can be looked at: it is not traced, and all of it is here."""
    return not isinstance(x, jax.core.Tracer) and getattr(x, "is_fully_addressable", True)


def check_implementation(implementation: str | None) -> None:
    """The name is known and can run."""
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation={implementation!r}: must be None or one of {IMPLEMENTATIONS}"
        )
    if implementation not in (None, "xla"):
        raise NotImplementedError(
            f"implementation={implementation!r} cannot run: this operation has no such kernel; "
            "choose 'xla' or None"
        )


def check_arrays(query, key, value=None) -> None:
    """`[B,T,H,D]` floating queries, keys (and values) that fit together, T no longer than S."""
    arrays = {"query": query, "key": key, "value": value}
    for name, x in arrays.items():
        if x is None:
            continue
        if x.ndim != 4:
            raise ValueError(
                f"{name} has shape {x.shape}: must be [batch, time, heads, head_dim], 4 dimensions"
            )
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} has dtype {x.dtype}: must be floating; cast it")
        if math.prod(x.shape) == 0:
            raise ValueError(f"{name} has shape {x.shape}: every dimension must be at least 1")
    if key.shape[0] != query.shape[0] or key.shape[3] != query.shape[3]:
        raise ValueError(
            f"key has shape {key.shape}: its batch and head_dim must be those of query, "
            f"{query.shape}"
        )
    if value is not None and value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"value has shape {value.shape}: its batch, time and heads must be those of key, "
            f"{key.shape}"
        )
    if query.shape[2] % key.shape[2]:
        raise ValueError(
            f"key has {key.shape[2]} heads: they must divide the {query.shape[2]} heads of query "
            "evenly"
        )
    if query.shape[1] > key.shape[1]:
        raise ValueError(
            f"query has {query.shape[1]} tokens and key {key.shape[1]}: queries are the last "
            "tokens of the keys' sequence, so there cannot be more of them; cross-attention needs "
            "`attention`"
        )


def check_blocks(query, key, block_size, query_offset=None) -> jax.Array | int:
    """A positive block size that divides the position of the first query, which it returns."""
    if not isinstance(block_size, int | np.integer) or block_size < 1:
        raise ValueError(f"block_size={block_size!r}: must be a positive int")
    if query_offset is not None:
        if jnp.shape(query_offset) or not jnp.issubdtype(
            jnp.result_type(query_offset), jnp.integer
        ):
            raise ValueError(
                f"query_offset is {jnp.result_type(query_offset)} {jnp.shape(query_offset)}: must "
                "be one integer, the same for all rows"
            )
        if known(query_offset) and int(query_offset) % block_size:
            raise ValueError(
                f"query_offset={int(query_offset)}: must be a multiple of block_size={block_size}; "
                "give the queries from the block's beginning on and drop their outputs"
            )
        return query_offset
    offset = key.shape[1] - query.shape[1]
    if offset % block_size:
        raise ValueError(
            f"query has {query.shape[1]} tokens and key {key.shape[1]}: the first query stands at "
            f"position {offset}, which must be a multiple of block_size={block_size}; give the "
            f"{offset % block_size} queries before it too (pad query at the front) and drop their "
            "outputs"
        )
    return offset


def check_rows(key, lengths, segment_ids) -> tuple[jax.Array | None, jax.Array | None]:
    """`lengths [B]` and `segment_ids [B, S]`, integers, lengths between 0 and S; as jax arrays."""
    batch, num_keys = key.shape[:2]
    for name, x, shape in (
        ("lengths", lengths, (batch,)),
        ("segment_ids", segment_ids, (batch, num_keys)),
    ):
        if x is None:
            continue
        if jnp.shape(x) != shape:
            raise ValueError(
                f"{name} has shape {jnp.shape(x)}: must be {shape}, counted in tokens of key"
            )
        if not jnp.issubdtype(jnp.result_type(x), jnp.integer):
            raise ValueError(f"{name} has dtype {jnp.result_type(x)}: must be an integer type")
    if lengths is not None and known(lengths):
        values = np.asarray(lengths)
        if values.min() < 0 or values.max() > num_keys:
            raise ValueError(
                f"lengths={values.tolist()}: each must be between 0 and the {num_keys} tokens of "
                "key"
            )
    return (
        None if lengths is None else jnp.asarray(lengths),
        None if segment_ids is None else jnp.asarray(segment_ids),
    )


def check_finite(**arrays) -> None:
    """No NaN or infinity in arrays whose values are known."""
    for name, x in arrays.items():
        if not known(x):
            continue
        with jax.ensure_compile_time_eval():  # a constant of a function that is being traced
            count = int((~jnp.isfinite(x)).sum())
        if count:
            raise ValueError(
                f"{name} has {count} values that are NaN or infinite: block scores would be "
                "meaningless; find where they come from"
            )
