"""The mLSTM cell beside transformers' native one on torch, on this CPU.

    python scripts/bench_xlstm.py                      # 16,384 tokens; torch's gradient is slow
    python scripts/bench_xlstm.py --length 4096
    python scripts/bench_xlstm.py --no-torch

1 x T x 4 heads, dqk 96, dv 192, float32: a layer of the 165M model. Same inputs for both, two
threads for torch. Medians; memory of ours is temporary memory by the compiler's account, torch's is
the growth of the process's peak. `difference` is the largest of the outputs, as a share of the
largest output. Torch is left out if it or transformers' model is not installed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import mlstm

HEADS, DQK, DV = 4, 96, 192
TORCH_CHUNK = 64  # transformers' default


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--length", type=int, default=16384, help="tokens, a multiple of 64")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each (the median counts)")
    parser.add_argument("--chunk-size", type=int, default=None, help="ours; default: the library's")
    parser.add_argument("--no-torch", action="store_true", help="ours alone")
    parser.add_argument("--output", type=Path, default=Path("bench_xlstm.json"))
    arguments = parser.parse_args()
    report: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": versions("jax", "torch", "transformers"),
        "shape": f"1 x {arguments.length} x {HEADS} heads, dqk {DQK}, dv {DV}, float32",
        "mlstm": bench_mlstm(
            arguments.length, arguments.repeats, arguments.chunk_size, not arguments.no_torch
        ),
    }
    print_table(report["mlstm"])
    arguments.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def versions(*packages: str) -> dict[str, str]:
    return {p: importlib.metadata.version(p) for p in packages if importlib.util.find_spec(p)}


def bench_mlstm(
    length: int, repeats: int, chunk_size: int | None, with_torch: bool
) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 1, length, HEADS, DQK)).astype(np.float32)
    v, d_h = rng.normal(size=(2, 1, length, HEADS, DV)).astype(np.float32)
    i, f = rng.normal(size=(2, 1, length, HEADS)).astype(np.float32)
    inputs = [jnp.asarray(x) for x in (q, k, v, i - 2, f + 4)]

    def forward(*inputs: jax.Array) -> jax.Array:
        return mlstm(*inputs, chunk_size=chunk_size)

    def both(d_h: jax.Array, *inputs: jax.Array) -> Any:
        h, vjp = jax.vjp(forward, *inputs)
        return h, vjp(d_h)

    rows = []
    for name, compiled, given in (
        ("forward", jax.jit(forward).lower(*inputs).compile(), inputs),
        (
            "forward + backward",
            jax.jit(both).lower(d_h, *inputs).compile(),
            [jnp.asarray(d_h), *inputs],
        ),
    ):
        seconds = median_seconds(
            lambda c=compiled, given=given: jax.block_until_ready(c(*given)), repeats
        )
        memory = compiled.memory_analysis().temp_size_in_bytes / 2**20
        rows.append({"mlstm": name, "seconds": seconds, "MiB": memory})
        print(f"{name}: {seconds:.3f} s", flush=True)
    if with_torch and importlib.util.find_spec("torch") is not None:
        h = np.asarray(jax.jit(forward)(*inputs))
        for row, theirs in zip(
            rows, bench_torch([np.asarray(x) for x in inputs], d_h, h, repeats), strict=True
        ):
            row.update(theirs)
            row["x torch"] = row["torch seconds"] / row["seconds"]
    return rows


def bench_torch(
    inputs: list[np.ndarray], d_h: np.ndarray, h: np.ndarray, repeats: int
) -> list[dict[str, float]]:
    import torch
    from transformers.models.xlstm.modeling_xlstm import mlstm_chunkwise_native_autograd

    torch.set_num_threads(2)
    arrays = [torch.tensor(x).transpose(1, 2).contiguous() for x in inputs]
    cotangent = torch.tensor(d_h).transpose(1, 2).contiguous()
    before = peak_mib()

    def forward() -> Any:
        with torch.no_grad():
            return run(arrays)

    def run(arrays: list[Any]) -> Any:
        out = mlstm_chunkwise_native_autograd(*arrays, chunk_size=TORCH_CHUNK)
        return out[0] if isinstance(out, tuple) else out

    def both() -> None:
        leaves = [x.clone().requires_grad_() for x in arrays]
        run(leaves).backward(cotangent)

    theirs = forward().transpose(1, 2).numpy()
    rows = []
    for call, name, count in ((forward, "forward", repeats), (both, "both", min(repeats, 3))):
        seconds = median_seconds(call, count)
        rows.append({"torch seconds": seconds, "torch MiB": peak_mib() - before})
        print(f"torch {name}: {seconds:.3f} s", flush=True)
    rows[0]["difference"] = float(np.abs(h - theirs).max() / np.abs(theirs).max())
    return rows


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


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
