"""Speed and memory of the core beside transformers on torch, in one run, on the same weights.

    python scripts/bench_core.py                     # SmolLM2-135M, float32, medians of 5
    python scripts/bench_core.py --only decode       # one workload
    python scripts/bench_core.py --quick             # a tiny random model, seconds: a smoke test

Each side of each workload is a process of its own, which loads the same Hugging Face directory,
warms up (compiles), and then waits to be told to run; the sides take turns, so that both meet the
same machine. Peak memory is the high-water mark of the process's resident set, loading included.
Needs the extra `parity`.

Workloads, all float32, greedy, batch 1 unless it says otherwise:
  decode     seconds between the first and the last of N new tokens after a prompt of P
  prefill    seconds from a prompt of P tokens to its first new token
  train      one AdamW step with clipping on rows x tokens
  attention  causal attention, 1 x T x 8 x 64, `pallas_kernels.attention` and torch's SDPA
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

# Both sides on the CPU, whatever else the machine has.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
SIDES = ("jaxlab", "torch")
WORKLOADS = ("decode", "prefill", "train", "attention")
# What the ratio torch / jaxlab of the times should be at least.
TARGETS = {"decode": 2.5, "prefill": 1.2, "train": 1.5, "attention": 1 / 1.5}


class Sizes(NamedTuple):
    """How much work each workload is."""

    decode_prompt: int = 32
    decode_new: int = 128
    prefill: int = 1024
    train_rows: int = 4
    train_tokens: int = 256
    attention: int = 16384


QUICK = Sizes(8, 8, 48, 2, 32, 256)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="smollm2-135m-instruct", help="anything jaxlab.load reads"
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="runs of each side (the median counts)"
    )
    parser.add_argument(
        "--only", choices=WORKLOADS, action="append", help="may be given repeatedly"
    )
    parser.add_argument("--output", type=Path, default=Path("bench_core.json"))
    parser.add_argument("--quick", action="store_true", help="tiny random model, two repeats")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        side, workload, directory, sizes = arguments.worker
        return worker(side, workload, directory, Sizes(*json.loads(sizes)))

    sizes = QUICK if arguments.quick else Sizes()
    repeats = 2 if arguments.quick else arguments.repeats
    with tempfile.TemporaryDirectory() as directory:
        save_model(None if arguments.quick else arguments.model, directory)
        rows = [
            compare(workload, directory, sizes, repeats) for workload in arguments.only or WORKLOADS
        ]
    report = {
        "model": "random" if arguments.quick else arguments.model,
        "sizes": sizes._asdict(),
        "repeats": repeats,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("jax", "torch", "transformers")},
        "results": rows,
    }
    arguments.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(table(rows, sizes))
    print(f"\n{report['machine']}; {report['versions']}; medians of {repeats}; {arguments.output}")


def save_model(source: str | None, directory: str) -> None:
    """Write what both sides load. In a process of its own, so that none inherits its memory."""
    script = (
        "import sys, jax, jaxlab\n"
        "from jaxlab.checkpoints import save_pretrained\n"
        "from jaxlab.data.tokenizers import ByteTokenizer\n"
        "from jaxlab.models import ModelConfig, Transformer, init_params\n"
        "source, directory = sys.argv[1:]\n"
        "if source:\n"
        "    jaxlab.load(source).save(directory)\n"
        "else:\n"
        "    config = ModelConfig(vocab_size=512, hidden_size=64, intermediate_size=128,\n"
        "        num_layers=2, num_heads=4, num_kv_heads=2, tie_word_embeddings=True)\n"
        "    params = init_params(Transformer(config), jax.random.key(0))\n"
        "    save_pretrained(directory, params, config, ByteTokenizer())\n"
    )
    subprocess.run([sys.executable, "-c", script, source or "", directory], check=True)


def compare(workload: str, directory: str, sizes: Sizes, repeats: int) -> dict[str, Any]:
    """Run both sides of a workload in turn."""
    command = [sys.executable, __file__, "--worker"]
    processes = {
        side: subprocess.Popen(
            [*command, side, workload, directory, json.dumps(sizes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for side in SIDES
    }

    def ask(side: str, request: str | None) -> float:
        process = processes[side]
        assert process.stdin is not None
        assert process.stdout is not None
        if request is not None:
            process.stdin.write(request + "\n")
            process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            sys.exit(f"the {side} side of {workload} failed (exit code {process.wait()})")
        return json.loads(answer)

    try:
        for side in SIDES:
            ask(side, None)  # warmed up
        seconds: dict[str, list[float]] = {side: [] for side in SIDES}
        for _ in range(repeats):
            for side in SIDES:
                seconds[side].append(ask(side, "run"))
        peak = {side: ask(side, "peak") for side in SIDES}
    finally:
        for process in processes.values():
            assert process.stdin is not None
            process.stdin.close()  # the end of its input ends a worker
            process.wait()
    median = {side: statistics.median(seconds[side]) for side in SIDES}
    return {
        "workload": workload,
        "seconds": seconds,
        "median_seconds": median,
        "peak_mib": peak,
        "ratio": median["torch"] / median["jaxlab"],
        "target_ratio": TARGETS[workload],
    }


def table(rows: list[dict[str, Any]], sizes: Sizes) -> str:
    """The results as a Markdown table."""
    amounts = {
        "decode": (f"decode {sizes.decode_new} tokens", sizes.decode_new - 1, "tokens/s"),
        "prefill": (f"prefill {sizes.prefill} tokens", sizes.prefill, "tokens/s"),
        "train": (
            f"train step {sizes.train_rows}x{sizes.train_tokens} (AdamW)",
            sizes.train_rows * sizes.train_tokens,
            "tokens/s",
        ),
        "attention": (f"attention 1x{sizes.attention}x8x64", 1, "runs/s"),
    }
    lines = [
        "| workload | jaxlab | torch | times as fast | wanted | peak MiB jaxlab | torch |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        name, amount, unit = amounts[row["workload"]]
        speeds = [f"{amount / row['median_seconds'][side]:.4g} {unit}" for side in SIDES]
        peaks = [f"{row['peak_mib'][side]:.0f}" for side in SIDES]
        ratios = [f"{row['ratio']:.2f}", f"{row['target_ratio']:.2f}"]
        lines.append("| " + " | ".join([name, *speeds, *ratios, *peaks]) + " |")
    return "\n".join(lines)


def worker(side: str, workload: str, directory: str, sizes: Sizes) -> None:
    """One side: prepare and warm up, then answer `run` with seconds and `peak` with MiB."""
    prepare = {"jaxlab": JAXLAB, "torch": TORCH}[side][workload]
    run = prepare(directory, sizes)
    run()
    print("0", flush=True)
    for line in sys.stdin:
        if line.strip() == "run":
            print(json.dumps(run()), flush=True)
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            print(json.dumps(peak / (2**20 if sys.platform == "darwin" else 2**10)), flush=True)


def seconds_of(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def prompt(length: int) -> list[int]:
    """Token ids to run on: their values do not matter to the time."""
    return [3 + (7 * i) % 251 for i in range(length)]


def jaxlab_generator(directory: str) -> Any:
    import jaxlab
    from jaxlab.inference import Generator

    model = jaxlab.load(directory, eos_token_id=None)  # so that every run has all its tokens
    return Generator(model.module, model.params)


def jaxlab_decode(directory: str, sizes: Sizes) -> Callable[[], float]:
    from jaxlab.inference import SamplingParams

    generator = jaxlab_generator(directory)
    sampling = SamplingParams(max_new_tokens=sizes.decode_new)

    def run() -> float:
        [generation] = generator.generate(prompt(sizes.decode_prompt), sampling)
        assert len(generation.token_ids) == sizes.decode_new
        return generation.timing.decode_seconds

    return run


def jaxlab_prefill(directory: str, sizes: Sizes) -> Callable[[], float]:
    from jaxlab.inference import SamplingParams

    generator = jaxlab_generator(directory)
    sampling = SamplingParams(max_new_tokens=1)
    return lambda: seconds_of(lambda: generator.generate(prompt(sizes.prefill), sampling))


def jaxlab_train(directory: str, sizes: Sizes) -> Callable[[], float]:
    import jax
    import jax.numpy as jnp

    import jaxlab
    from jaxlab.objectives import language_modeling
    from jaxlab.training import OptimizerConfig, TrainState, make_optimizer, make_train_step

    model = jaxlab.load(directory)
    config = OptimizerConfig(name="adamw", learning_rate=1e-4, schedule="constant", clip_norm=1.0)
    optimizer = make_optimizer(config, steps=100)
    step = jax.jit(make_train_step(language_modeling(model.module), optimizer), donate_argnums=0)
    state = TrainState.create(model.params, optimizer, jax.random.key(0))
    del model
    rows = jnp.asarray([prompt(sizes.train_tokens + 1)] * sizes.train_rows, jnp.int32)
    batch = {"tokens": rows[:, :-1], "targets": rows[:, 1:]}

    def update() -> None:
        nonlocal state
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))

    return lambda: seconds_of(update)


def jaxlab_attention(_: str, sizes: Sizes) -> Callable[[], float]:
    import jax

    from pallas_kernels import attention

    shape = (1, sizes.attention, 8, 64)
    q, k, v = (jax.random.normal(jax.random.key(i), shape) for i in range(3))
    attend = jax.jit(attention)
    return lambda: seconds_of(lambda: attend(q, k, v).block_until_ready())


def torch_model(directory: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def torch_decode(directory: str, sizes: Sizes) -> Callable[[], float]:
    import torch

    model = torch_model(directory)
    tokens = torch.tensor([prompt(sizes.decode_prompt)])

    class Clock:
        """A streamer that notes when tokens come: the prompt first, then one at a time."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, _: Any) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    def run() -> float:
        clock = Clock()
        new = sizes.decode_new
        model.generate(
            tokens, do_sample=False, max_new_tokens=new, min_new_tokens=new, streamer=clock
        )
        assert len(clock.times) == new + 1
        return clock.times[-1] - clock.times[1]

    return run


def torch_prefill(directory: str, sizes: Sizes) -> Callable[[], float]:
    import torch

    model = torch_model(directory)
    tokens = torch.tensor([prompt(sizes.prefill)])

    def run() -> None:
        with torch.no_grad():
            model(tokens, use_cache=True, logits_to_keep=1).logits[:, -1].argmax(-1).item()

    return lambda: seconds_of(run)


def torch_train(directory: str, sizes: Sizes) -> Callable[[], float]:
    import torch

    model = torch_model(directory).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)
    tokens = torch.tensor([prompt(sizes.train_tokens)] * sizes.train_rows)

    def update() -> None:
        model(tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return lambda: seconds_of(update)


def torch_attention(_: str, sizes: Sizes) -> Callable[[], float]:
    import torch

    shape = (1, 8, sizes.attention, 64)
    q, k, v = (torch.randn(shape) for _ in range(3))
    attend = torch.nn.functional.scaled_dot_product_attention

    def run() -> None:
        with torch.no_grad():
            attend(q, k, v, is_causal=True)

    return lambda: seconds_of(run)


JAXLAB = {
    "decode": jaxlab_decode,
    "prefill": jaxlab_prefill,
    "train": jaxlab_train,
    "attention": jaxlab_attention,
}
TORCH = {
    "decode": torch_decode,
    "prefill": torch_prefill,
    "train": torch_train,
    "attention": torch_attention,
}


if __name__ == "__main__":
    main()
