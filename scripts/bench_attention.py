"""The sparse attention patterns beside dense attention, ours and torch's, in one run on this CPU.

    python scripts/bench_attention.py                        # 32,768 tokens, minutes
    python scripts/bench_attention.py --length 8192 --gradient
    python scripts/bench_attention.py --part decode          # a token at 65,536 tokens of context

Part "attention": 1 x T x 8 heads x 64, float32. XAttention, scoring included, on queries and keys
in which each block of queries looks for a tenth of the blocks of keys before it; SepLLM with a
window of 1,024 and 4 % separators; CCA with groups of 16 and a window of 1,024. Medians; times as
fast as dense; temporary memory by the compiler's account. On queries and keys without structure
XAttention keeps nearly all blocks and gains nothing.

Part "decode": one layer of 8 heads x 64 behind a full context; seconds a token of the attention
sublayer, and bytes of the cache. Torch is left out if it is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from jaxlab.models import ModelConfig, Transformer, init_cache, init_params, unstack_layers
from pallas_kernels import attention, cca_attention, kv_retention, sepllm_attention, xattention

HEADS, HEAD_DIM, BLOCK = 8, 64, 128
WINDOW, GROUP, INITIAL, SEPARATORS = 1024, 16, 4, 0.04
Call = Callable[..., Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("attention", "decode", "all"), default="all")
    parser.add_argument("--length", type=int, default=32768, help="tokens of part attention")
    parser.add_argument("--context", type=int, default=65536, help="tokens before the decoded one")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each (the median counts)")
    parser.add_argument("--gradient", action="store_true", help="forward and backward")
    parser.add_argument("--output", type=Path, default=Path("bench_attention.json"))
    arguments = parser.parse_args()
    report: dict[str, Any] = {"machine": f"{platform.machine()}, {os.cpu_count()} cores"}
    if arguments.part != "decode":
        report["attention"] = bench_attention(
            arguments.length, arguments.repeats, arguments.gradient
        )
        print_table(report["attention"])
    if arguments.part != "attention":
        report["decode"] = bench_decode(arguments.context, arguments.repeats)
        print_table(report["decode"])
    arguments.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def bench_attention(length: int, repeats: int, gradient: bool) -> list[dict[str, Any]]:
    q, k, v = structured(length)
    rng = np.random.default_rng(1)
    separators = jnp.asarray(rng.random((1, length)) < SEPARATORS)
    threshold = sparse_threshold(q, k, v)
    density = float(chosen(q, k, v, threshold).mean())
    kept = float(kv_retention(separators, window=WINDOW, initial_tokens=INITIAL).mean.mean())
    cores = np.maximum(np.arange(1, length + 1) - WINDOW, 0) // GROUP
    met = np.arange(1, length + 1) - cores * (GROUP - 1)
    calls: dict[str, tuple[Call, float]] = {
        "dense": (attention, 1.0),
        f"XAttention, stride 16, threshold {threshold}": (
            lambda q, k, v: xattention(q, k, v, threshold=threshold, stride=16, block_size=BLOCK),
            density,
        ),
        f"SepLLM, window {WINDOW}": (
            lambda q, k, v: sepllm_attention(
                q, k, v, separators, window=WINDOW, initial_tokens=INITIAL
            ),
            kept,
        ),
        f"CCA, groups of {GROUP}, window {WINDOW}": (
            lambda q, k, v: cca_attention(q, k, v, group_size=GROUP, window_size=WINDOW),
            float(met.sum() / (length * (length + 1) / 2)),
        ),
    }
    rows = []
    for name, (call, share) in calls.items():
        function = jax.jit(with_gradient(call) if gradient else call)
        compiled = function.lower(q, k, v).compile()
        seconds = median_seconds(lambda c=compiled: jax.block_until_ready(c(q, k, v)), repeats)
        memory = compiled.memory_analysis().temp_size_in_bytes / 2**20
        rows.append({"attention": name, "seconds": seconds, "MiB": memory, "keys met": share})
        print(f"{name}: {seconds:.3f} s", flush=True)
    torch_seconds = bench_torch(q, k, v, repeats, gradient)
    if torch_seconds is not None:
        rows.append({"attention": "torch SDPA", "seconds": torch_seconds, "keys met": 1.0})
    for row in rows:
        row["x dense"] = rows[0]["seconds"] / row["seconds"]
        if torch_seconds is not None:
            row["x torch"] = torch_seconds / row["seconds"]
    return rows


def structured(length: int) -> list[jax.Array]:
    """Queries, keys, values `[1, T, H, D]`: each block of queries looks for a tenth of the past."""
    rng = np.random.default_rng(0)
    count = -(-length // BLOCK)
    signature = rng.normal(size=(count, HEADS, HEAD_DIM))
    signature /= np.linalg.norm(signature, axis=-1, keepdims=True)
    query, key = rng.normal(size=(2, count, BLOCK, HEADS, HEAD_DIM)) * 0.5
    key += 6 * signature[:, None]
    for i in range(count):
        for head in range(HEADS):
            picks = rng.choice(i + 1, max(1, round(0.09 * (i + 1))), replace=False)
            query[i, :, head] += 12 * signature[picks, head].sum(0)
    value = rng.normal(size=query.shape)
    shape = (1, count * BLOCK, HEADS, HEAD_DIM)
    return [jnp.asarray(x.reshape(shape)[:, :length], jnp.float32) for x in (query, key, value)]


def sparse_threshold(q: jax.Array, k: jax.Array, v: jax.Array) -> float:
    """The threshold whose density is nearest to a tenth."""
    candidates = (0.9, 0.95, 0.97, 0.98, 0.985, 0.99, 0.993, 0.996, 0.998)
    densities = [float(chosen(q, k, v, t).mean()) for t in candidates]
    return min(zip(candidates, densities, strict=True), key=lambda pair: abs(pair[1] - 0.1))[0]


@jax.jit
def chosen(q: jax.Array, k: jax.Array, v: jax.Array, threshold: float) -> jax.Array:
    return xattention(q, k, v, threshold=threshold, stride=16, return_density=True)[1]


def with_gradient(call: Call) -> Call:
    return jax.grad(lambda q, k, v: jnp.sum(call(q, k, v) * v), (0, 1, 2))


def bench_torch(
    q: jax.Array, k: jax.Array, v: jax.Array, repeats: int, gradient: bool
) -> float | None:
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    arrays = [torch.tensor(np.asarray(x)).transpose(1, 2).contiguous() for x in (q, k, v)]
    for array in arrays:
        array.requires_grad_(gradient)

    def run() -> None:
        out = torch.nn.functional.scaled_dot_product_attention(*arrays, is_causal=True)
        if gradient:
            (out * arrays[2]).sum().backward()

    return median_seconds(run, repeats)


def bench_decode(context: int, repeats: int) -> list[dict[str, Any]]:
    patterns = {
        "full": "full",
        "xattention (decodes dense)": {"pattern": "xattention"},
        "sepllm": {
            "pattern": "sepllm",
            "window": WINDOW,
            "separators": (0,),
            "separator_capacity": round(0.1 * context),
        },
        "sepllm, streaming, capacity 324": {
            "pattern": "sepllm",
            "separators": (0,),
            "positions": "cache",
        },
        "cca": {"pattern": "cca", "group_size": GROUP, "window_size": WINDOW},
    }
    rows = []
    for name, pattern in patterns.items():
        config = ModelConfig(
            vocab_size=16,
            hidden_size=HEADS * HEAD_DIM,
            intermediate_size=8,
            num_layers=1,
            num_heads=HEADS,
            max_position_embeddings=context + 1024,
            attention=pattern,
        )
        rows.append({"cache": name, **decode_speed(config, context, repeats)})
        print(f"{name}: {rows[-1]['ms a token']:.3f} ms", flush=True)
    for row in rows:
        row["x full"] = rows[0]["ms a token"] / row["ms a token"]
    return rows


def decode_speed(config: ModelConfig, context: int, repeats: int) -> dict[str, float]:
    """Of a cache that holds `context` tokens, one in fourteen a separator."""
    module = Transformer(config)
    params = unstack_layers(init_params(module, jax.random.key(0)))
    cache = init_cache(config, 1, context + 1024, unstacked=True)
    nbytes = cache.nbytes
    tokens = np.random.default_rng(0).integers(0, 14, (1, context), dtype=np.int32)
    steps = 32

    @jax.jit
    def extend(cache: Any, tokens: jax.Array) -> Any:
        return module.apply({"params": params}, tokens, cache=cache)[1]

    @jax.jit
    def decode(cache: Any) -> Any:
        def step(_: Any, cache: Any) -> Any:
            hidden, cache = module.apply(
                {"params": params}, jnp.ones((1, 1), jnp.int32), cache=cache, method="hidden_states"
            )
            # The result counts, or the attention would be left out as dead code.
            return cache.replace(lengths=cache.lengths + (hidden[0, 0, 0] > jnp.inf))

        return jax.lax.fori_loop(0, steps, step, cache)

    for start in range(0, context, 1024):
        cache = extend(cache, tokens[:, start : start + 1024])
    seconds = median_seconds(lambda: jax.block_until_ready(decode(cache)), repeats)
    return {"ms a token": seconds / steps * 1e3, "cache MiB": nbytes / 2**20}


def median_seconds(run: Callable[[], Any], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def print_table(rows: list[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))

    def cell(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    print()
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(cell(row.get(column, "")) for column in columns) + " |")
    print()


if __name__ == "__main__":
    main()
