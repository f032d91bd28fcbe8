"""Argument checks of the mLSTM operations; all before any array work."""

import math

import jax.numpy as jnp
import numpy as np

INPUT_GATES = ("exp", "sigmoid")
LAYOUT = {4: "[batch, time, heads, dim]", 3: "[batch, heads, dim]"}


def check_tokens(*, q=None, k, v, ndim: int = 4) -> None:
    """Floating `q, k [..., heads, dqk]` and `v [..., heads, dv]` that fit together."""
    arrays = {name: x for name, x in (("q", q), ("k", k), ("v", v)) if x is not None}
    for name, x in arrays.items():
        if x.ndim != ndim:
            raise ValueError(f"{name} has shape {x.shape}: must be {LAYOUT[ndim]}")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} has dtype {x.dtype}: must be floating; cast it")
        if math.prod(x.shape) == 0:
            raise ValueError(
                f"{name} has shape {x.shape}: every dimension must be at least 1; an empty "
                "sequence has no output, keep the state instead"
            )
    if q is not None and q.shape != k.shape:
        if q.shape[:-2] == k.shape[:-2] and q.shape[-1] == k.shape[-1]:
            raise ValueError(
                f"k has {k.shape[-2]} heads and q {q.shape[-2]}: must be equal, mLSTM heads share "
                "no keys; repeat k and v"
            )
        raise ValueError(f"k has shape {k.shape}: must be that of q, {q.shape}")
    if v.shape[:-1] != k.shape[:-1]:
        raise ValueError(
            f"v has shape {v.shape}: all its dimensions but the last must be those of k, {k.shape}"
        )


def check_gates(k, i, f, input_gate: str) -> None:
    """Floating gates, one number for each token and head of k."""
    for name, x in (("i", i), ("f", f)):
        if x.shape != k.shape[:-1]:
            raise ValueError(
                f"{name} has shape {x.shape}: must be {k.shape[:-1]}, one number for each token "
                "and head of k"
            )
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} has dtype {x.dtype}: must be floating; cast it")
    if input_gate not in INPUT_GATES:
        raise ValueError(f"input_gate={input_gate!r}: must be one of {INPUT_GATES}")


def check_options(input_gate: str, normalize: bool, eps: float) -> None:
    """A gate whose output is defined, and an eps that cannot make a denominator zero."""
    if input_gate == "exp" and not normalize:
        raise ValueError(
            "normalize=False: an exponential input gate needs the normaliser, without it h depends "
            "on the scale of the state; give input_gate='sigmoid'"
        )
    if not eps >= 0:
        raise ValueError(f"eps={eps}: must not be negative")


def check_state(k, v, state) -> None:
    """`(c, n, m)` of these heads; c and n in float32, bfloat16 or float64, m in float32 or 64."""
    if not isinstance(state, tuple | list) or len(state) != 3 or any(x is None for x in state):
        raise ValueError(
            "initial_state must be all three of (c, n, m), as `return_state=True` gives them, or "
            "None for an empty memory"
        )
    heads = (k.shape[0], k.shape[-2])
    shapes = ((*heads, k.shape[-1], v.shape[-1]), (*heads, k.shape[-1]), heads)
    for name, x, shape in zip("cnm", state, shapes, strict=True):
        if jnp.shape(x) != shape:
            raise ValueError(
                f"{name} of initial_state has shape {jnp.shape(x)}: must be {shape}, of "
                "c [batch, heads, dqk, dv], n [batch, heads, dqk], m [batch, heads]"
            )
        dtype = jnp.result_type(x)
        narrow = name != "m" and dtype == jnp.bfloat16
        if not (narrow or dtype in (jnp.float32, jnp.float64)):
            raise ValueError(
                f"{name} of initial_state has dtype {dtype}: must be float32"
                + (", or bfloat16 to save memory" if name != "m" else "; rounded, it scales c")
            )


def check_rows(k, segment_ids, previous_segment, mask) -> None:
    """Integer ids and a boolean mask in the shapes of k's rows."""
    batch, time = k.shape[:2]
    for name, x, shape in (
        ("segment_ids", segment_ids, (batch, time)),
        ("previous_segment", previous_segment, (batch,)),
        ("mask", mask, (batch, time)),
    ):
        if x is None:
            continue
        if jnp.shape(x) != shape:
            raise ValueError(f"{name} has shape {jnp.shape(x)}: must be {shape}")
        if name == "mask":
            if jnp.result_type(x) != jnp.bool_:
                raise ValueError(
                    f"mask has dtype {jnp.result_type(x)}: must be bool, True for tokens and False "
                    "for padding; give mask != 0"
                )
        elif not jnp.issubdtype(jnp.result_type(x), jnp.integer):
            raise ValueError(f"{name} has dtype {jnp.result_type(x)}: must be an integer type")
    if previous_segment is not None and segment_ids is None:
        raise ValueError("previous_segment is given without segment_ids: give both or neither")


def check_chunk_size(chunk_size) -> None:
    """None or a positive int."""
    if chunk_size is not None and (not isinstance(chunk_size, int | np.integer) or chunk_size < 1):
        raise ValueError(f"chunk_size={chunk_size!r}: must be a positive int, or None")
