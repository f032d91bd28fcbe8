"""SepLLM on a real model without training: loss and cache against full attention and StreamingLLM.

    python scripts/claims/sepllm.py                          # about five minutes on two cores
    python scripts/claims/sepllm.py --part loss              # or stream
    python scripts/claims/sepllm.py --part stream --stream-tokens 1000000
    python scripts/claims/sepllm.py --quick                  # a tiny random model: a smoke test

SepLLM (arXiv:2412.12094) keeps the first tokens, every separator and a window. StreamingLLM is the
same without separators.

Part "loss": SmolLM2-135M as it is, three windows of 2,048 tokens of prose, nats a token over the
last 1,024 of each. StreamingLLM appears twice: with SepLLM's window, and with as many keys
(a longer window). Expect separators to help at equal windows, and not at equal numbers of keys: the
paper's gain at equal cache is of an 8B instruct model on reasoning tasks, which this does not test.

Part "stream": text without end through a cache of 324 tokens (4 initial, 32 or 64 separators,
window 224; positions counted in the cache), nats a token by tenths of the text, tokens a second,
bytes.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cca import tiny_model
from report import write_report
from windows import mean_losses, prose_tokens, windows, with_attention

import jaxlab
from jaxlab.models import init_cache, unstack_layers
from jaxlab.models.attention.sepllm import separator_mask
from jaxlab.objectives import cross_entropy
from pallas_kernels import kv_retention

INITIAL = 4
BLOCK = 512  # tokens of the stream a call


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("loss", "stream", "all"), default="all")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="what jaxlab.load reads")
    parser.add_argument("--stream-tokens", type=int, default=10_240, help="length of the stream")
    parser.add_argument("--output", default="claims", help="folder for JSON and pictures")
    parser.add_argument("--quick", action="store_true", help="tiny random model, short texts")
    arguments = parser.parse_args()
    model = tiny_model() if arguments.quick else jaxlab.load(arguments.model)
    if arguments.part != "stream":
        losses(arguments, model)
    if arguments.part != "loss":
        streams(arguments, model)


def sepllm(window: Any, separators: str = "exact", **options: Any) -> dict[str, Any]:
    return {
        "pattern": "sepllm",
        "initial_tokens": INITIAL,
        "window": window,
        "separators": separators,
        **options,
    }


def losses(arguments: argparse.Namespace, model: jaxlab.Model) -> None:
    rows = windows(prose_tokens(model), 80 if arguments.quick else 2048)
    length = rows.shape[1]
    results: list[dict[str, Any]] = []

    def measure(name: str, pattern: Any) -> float:
        module = with_attention(model, pattern)
        kept = share_kept(module.config, rows)
        each = mean_losses(module, model.params, rows, length // 2)
        results.append(
            {
                "attention": name,
                "nats": float(np.mean(each)),
                "above full": float(np.mean(each)) - (results[0]["nats"] if results else 0.0),
                "keys kept": kept,
            }
        )
        print(f"{name}: {np.mean(each):.3f} nats, {kept:.1%} of the keys", flush=True)
        return kept

    measure("full", "full")
    results[0]["above full"] = 0.0
    for window in (8,) if arguments.quick else (32, 128, 256):
        kept = measure(f"SepLLM, window {window}", sepllm(window))
        measure(f"StreamingLLM, window {window}", sepllm(window, "none"))
        same = round(kept * length) - INITIAL
        measure(f"StreamingLLM, as many keys (window {same})", sepllm(same, "none"))
        if window == 128:
            measure("SepLLM, window 128, runs of separators too", sepllm(128, "separator_only"))

    def figure(axes: Any) -> None:
        for kind, marker in (("SepLLM", "o"), ("StreamingLLM", "s"), ("full", "*")):
            points = [
                (r["keys kept"], r["nats"]) for r in results if r["attention"].startswith(kind)
            ]
            axes.plot(*zip(*sorted(points), strict=True), marker, label=kind, linestyle="-")
        axes.set(xlabel="share of keys kept at the end of the text", ylabel="nats a token")
        axes.legend(frameon=False)

    write_report(
        "sepllm_loss",
        ["attention", "nats", "above full", "keys kept"],
        results,
        figure,
        ["No training. Keys kept: by the last query, mean of the windows."],
        arguments.output,
    )


def share_kept(config: Any, rows: np.ndarray) -> float:
    attention = config.layer_attention[0]
    if attention.pattern == "full":
        return 1.0
    flags = separator_mask(config, jnp.asarray(rows))
    kept = kv_retention(flags, window=attention.window, initial_tokens=attention.initial_tokens)
    return float(kept.final.mean())


def streams(arguments: argparse.Namespace, model: jaxlab.Model) -> None:
    text = prose_tokens(model)
    count = 96 if arguments.quick else arguments.stream_tokens
    tokens = np.resize(text, count + 1)  # repeated where it is shorter than the stream
    capacity, window = (24, 8) if arguments.quick else (324, 224)
    cases = {
        f"SepLLM, {s} separators": sepllm(
            256, positions="cache", separator_capacity=s, local_window=window, capacity=capacity
        )
        for s in ((4,) if arguments.quick else (32, 64))
    }
    cases["StreamingLLM"] = sepllm(
        256, "none", positions="cache", local_window=capacity - INITIAL, capacity=capacity
    )
    results = []
    curves: dict[str, np.ndarray] = {}
    for name, pattern in cases.items():
        parts, seconds, nbytes = read_stream(
            model, pattern, tokens, 32 if arguments.quick else BLOCK
        )
        tenths = [float(np.mean(part)) for part in np.array_split(parts, min(10, len(parts)))]
        speeds = [float(np.mean(part)) for part in np.array_split(seconds, min(10, len(seconds)))]
        curves[name] = np.asarray(tenths)
        results.append(
            {
                "cache": name,
                "nats": float(np.mean(parts)),
                "first tenth": tenths[0],
                "last tenth": tenths[-1],
                "tokens/s, first tenth": speeds[0],
                "tokens/s, last": speeds[-1],
                "cache MiB": nbytes / 2**20,
            }
        )
        print(f"{name}: {results[-1]['nats']:.3f} nats, {speeds[-1]:.0f} tokens/s", flush=True)

    def figure(axes: Any) -> None:
        for name, curve in curves.items():
            axes.plot((np.arange(len(curve)) + 1) * count / len(curve), curve, "o-", label=name)
        axes.set(xlabel="tokens read", ylabel="nats a token")
        axes.legend(frameon=False)

    write_report(
        "sepllm_stream",
        list(results[0]),
        results,
        figure,
        [f"{count} tokens in one stream, capacity {capacity}, never reset."],
        arguments.output,
    )


def read_stream(
    model: jaxlab.Model, pattern: dict[str, Any], tokens: np.ndarray, block: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Nats a token and tokens a second of each block; bytes of the cache, which do not change."""
    module = with_attention(model, pattern)
    params = unstack_layers(model.params)
    cache = init_cache(module.config, 1, 1, unstacked=True)
    nbytes = cache.nbytes

    @jax.jit
    def step(cache: Any, tokens: jax.Array, targets: jax.Array):
        logits, cache = module.apply({"params": params}, tokens[None], cache=cache)
        return cross_entropy(logits, targets[None])[0], cache

    losses, speeds = [], []
    for start in range(0, len(tokens) - block, block):
        piece = tokens[start : start + block + 1]
        began = time.perf_counter()
        loss, cache = step(cache, piece[:-1], piece[1:])
        losses.append(float(loss))
        speeds.append(block / (time.perf_counter() - began))
    speeds[0] = speeds[1] if len(speeds) > 1 else speeds[0]  # the first call compiles
    assert cache.nbytes == nbytes
    return np.asarray(losses), np.asarray(speeds), nbytes


if __name__ == "__main__":
    main()
