"""Dense attention on this machine's CPU beside torch's, in one run.

    python scripts/bench_dense_attention.py [--long 16384] [--repeats 5] [--markdown FILE]

Prints, per shape: the median wall time of the forward pass and of forward + backward for
`pallas_kernels.attention` and for `torch.nn.functional.scaled_dot_product_attention`, float32,
their ratio (below 1: faster than torch), and the peak memory above the inputs. Measurements of the
two alternate, so that other work on the machine burdens both. Peak memory is that of a process
that does nothing else. Needs torch (extra `parity`). For the sparse patterns there is
scripts/bench_attention.py.
"""

import argparse
import ctypes
import dataclasses
import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import attention


@dataclasses.dataclass(frozen=True)
class Shape:
    """Queries `[batch, queries, heads, head_dim]` on keys `[batch, keys, kv_heads, head_dim]`."""

    name: str
    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int = 64

    @property
    def decoding(self) -> bool:
        """The queries are the last of the keys' sequence."""
        return self.queries < self.keys


def shapes(long: int) -> list[Shape]:
    return [
        Shape(f"causal 1x{long}x8x64", 1, long, long, 8, 8),
        Shape("causal 1x2048x8x64", 1, 2048, 2048, 8, 8),
        Shape("training 4x256, 9/3 heads", 4, 256, 256, 9, 3),
        Shape("prefill 1x1024, 9/3 heads", 1, 1024, 1024, 9, 3),
        Shape("decode 1 of 256, 9/3 heads", 1, 1, 256, 9, 3),
        Shape("decode 1 of 8192, 9/3 heads", 1, 1, 8192, 9, 3),
    ]


def inputs(shape: Shape) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    sizes = (
        (shape.queries, shape.heads),
        (shape.keys, shape.kv_heads),
        (shape.keys, shape.kv_heads),
    )
    return [
        rng.normal(size=(shape.batch, time, heads, shape.head_dim)).astype(np.float32)
        for time, heads in sizes
    ]


def jax_call(shape: Shape, backward: bool) -> Callable[[], object]:
    offset = shape.keys - shape.queries
    options = {"q_offset": jnp.full(shape.batch, offset)} if shape.decoding else {}
    call = functools.partial(attention, **options)
    if backward:
        call = jax.grad(lambda *arrays: attention(*arrays, **options).sum(), argnums=(0, 1, 2))
    arrays = [jnp.asarray(x) for x in inputs(shape)]
    compiled = jax.jit(call).lower(*arrays).compile()
    return lambda: jax.block_until_ready(compiled(*arrays))


def torch_call(shape: Shape, backward: bool) -> Callable[[], object]:
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    # Contiguous [batch, heads, time, head_dim]: the layout torch is fastest in.
    q, k, v = (torch.tensor(x).transpose(1, 2).contiguous() for x in inputs(shape))
    call = functools.partial(
        torch.nn.functional.scaled_dot_product_attention,
        is_causal=not shape.decoding,
        enable_gqa=shape.heads != shape.kv_heads,
    )
    if not backward:
        return lambda: call(q, k, v)
    for x in (q, k, v):
        x.requires_grad_()
    return lambda: torch.autograd.grad(call(q, k, v).sum(), (q, k, v))


CALLS = {"jaxlab": jax_call, "torch": torch_call}


def median_times(shape: Shape, backward: bool, repeats: int) -> dict[str, float]:
    """Seconds a call, by library."""
    calls = {name: make(shape, backward) for name, make in CALLS.items()}
    # A call too short for the clock is timed in bunches of about a millisecond.
    bunch = {}
    for name, call in calls.items():
        call()
        start = time.perf_counter()
        call()
        bunch[name] = max(1, round(1e-3 / (time.perf_counter() - start)))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            for _ in range(bunch[name]):
                call()
            times[name].append((time.perf_counter() - start) / bunch[name])
    return {name: statistics.median(values) for name, values in times.items()}


def resident_bytes(field: str) -> int:
    """`VmRSS` (now) or `VmHWM` (peak) of this process; Linux only."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def extra_memory(shape: Shape, library: str, backward: bool) -> int:
    """Bytes by which a call raises the peak memory of a process of its own."""
    command = [sys.executable, __file__, "--memory-of", library, "--shape"]
    command += [json.dumps(dataclasses.asdict(shape)), *(["--backward"] if backward else [])]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def print_extra_memory(shape: Shape, library: str, backward: bool) -> None:
    tiny = dataclasses.replace(shape, batch=1, queries=min(shape.queries, 300), keys=300)
    CALLS[library](tiny, backward)()  # loads libraries and starts threads
    call = CALLS[library](shape, backward)
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what was freed does not serve the call
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident_bytes("VmRSS")
    call()
    print(resident_bytes("VmHWM") - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--long", type=int, default=16384, help="length of the longest sequence")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--markdown", help="write the table to this file as well")
    parser.add_argument("--memory-of", choices=sorted(CALLS), help=argparse.SUPPRESS)
    parser.add_argument("--shape", help=argparse.SUPPRESS)
    parser.add_argument("--backward", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        shape = Shape(**json.loads(options.shape))
        print_extra_memory(shape, options.memory_of, options.backward)
        return

    import torch

    lines = [
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
        f"jax {jax.__version__}, torch {torch.__version__}, float32, "
        f"medians of {options.repeats}, `{' '.join(['python', *sys.argv])}`",
        "",
        "| attention | pass | jaxlab ms | torch ms | ratio | jaxlab MB | torch MB |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    print("\n".join(lines), flush=True)
    for shape in shapes(options.long):
        for backward in (False,) if shape.decoding else (False, True):
            seconds = median_times(shape, backward, options.repeats)
            memory = {name: extra_memory(shape, name, backward) / 1e6 for name in CALLS}
            line = (
                f"| {shape.name} | {'forward + backward' if backward else 'forward'} "
                f"| {seconds['jaxlab'] * 1e3:.3g} | {seconds['torch'] * 1e3:.3g} "
                f"| {seconds['jaxlab'] / seconds['torch']:.2f} "
                f"| {memory['jaxlab']:.0f} | {memory['torch']:.0f} |"
            )
            lines.append(line)
            print(line, flush=True)
    if options.markdown:
        Path(options.markdown).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
