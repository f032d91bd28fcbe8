"""SepLLM on a real model: loss and cache against full attention and StreamingLLM.

    python scripts/claims/sepllm.py --part loss     # or tune, stream, million; all: 20 minutes
    python scripts/claims/sepllm.py --part tune --steps 60 --seeds 1 --length 1024
    python scripts/claims/sepllm.py --part stream --stream-tokens 1000000   # hours
    python scripts/claims/sepllm.py --quick                  # a tiny random model: a smoke test

SepLLM (arXiv:2412.12094) keeps the first tokens, every separator and a window. StreamingLLM is the
same without separators.

Part "loss": SmolLM2-135M as it is, three windows of 2,048 tokens of prose, nats a token over the
last 1,024 of each. StreamingLLM appears twice: with SepLLM's window, and with as many keys
(a longer window). Expect separators to help at equal windows, and not at equal numbers of keys: the
paper's gain at equal cache is of an 8B instruct model on reasoning tasks, which this does not test.

Part "tune": a short post-training of the attention's weights on other parts of the same text, with
full attention, SepLLM, and StreamingLLM with the same window and with as many keys; three draws of
the rows. It shows whether the gap to full attention, trained alike, shrinks, not where it ends.

Part "stream": text without end through a cache of 324 tokens (4 initial, 32 or 64 separators,
window 224; positions counted in the cache), nats a token by tenths of the text, tokens a second,
bytes.

Part "million": 1,024,000 tokens through the same cache of a random model of two layers, width 64,
which costs seconds: seconds a token, bytes of the cache and of the process, each 102,400 tokens.
The cache is the real one; that the model is small hides nothing of it, for its work a token does
not depend on how many came before. Losses of a random model say nothing and are not shown.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cca import tiny_model
from post_training import report_post_training
from report import write_report
from windows import mean_losses, prose_tokens, windows, with_attention

import jaxlab
from jaxlab.data.tokenizers import ByteTokenizer
from jaxlab.models import ModelConfig, Transformer, init_cache, init_params, unstack_layers
from jaxlab.models.attention.sepllm import separator_mask
from jaxlab.objectives import cross_entropy
from pallas_kernels import kv_retention

INITIAL = 4
BLOCK = 512  # tokens of the stream a call


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = {"loss": losses, "tune": tune, "stream": streams, "million": million}
    parser.add_argument("--part", choices=(*parts, "all"), default="all")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="what jaxlab.load reads")
    parser.add_argument("--stream-tokens", type=int, default=10_240, help="length of the stream")
    parser.add_argument("--steps", type=int, default=4, help="of part tune, for each seed")
    parser.add_argument("--seeds", type=int, default=3, help="draws of part tune's rows")
    parser.add_argument("--length", type=int, default=256, help="tokens of a row of part tune")
    parser.add_argument("--output", default="claims", help="folder for JSON and pictures")
    parser.add_argument("--quick", action="store_true", help="tiny random model, short texts")
    arguments = parser.parse_args()
    real = arguments.part != "million" and not arguments.quick
    model = jaxlab.load(arguments.model) if real else tiny_model()
    for name, part in parts.items():
        if arguments.part in (name, "all"):
            part(arguments, model)


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


def tune(arguments: argparse.Namespace, model: jaxlab.Model) -> None:
    length = 80 if arguments.quick else arguments.length
    window = length // 8
    pattern = sepllm(window)
    rows = windows(prose_tokens(model), length)
    keys = round(share_kept(with_attention(model, pattern).config, rows) * length)
    report_post_training(
        "sepllm_tune",
        model,
        {
            "full": ("full", length),
            f"SepLLM, window {window}": (pattern, keys),
            f"StreamingLLM, window {window}": (sepllm(window, "none"), window + INITIAL),
            f"StreamingLLM, window {keys - INITIAL}": (sepllm(keys - INITIAL, "none"), keys),
        },
        length=length,
        steps=2 if arguments.quick else arguments.steps,
        seeds=2 if arguments.quick else arguments.seeds,
        output=arguments.output,
    )


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


def million(arguments: argparse.Namespace, _: jaxlab.Model) -> None:
    total, marks = (4 * BLOCK, 4) if arguments.quick else (2000 * BLOCK, 10)
    config = ModelConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4
    )
    params = init_params(Transformer(config), jax.random.key(0))
    model = jaxlab.Model(Transformer(config), params, ByteTokenizer())
    tokens = np.resize(prose_tokens(model), total)
    results = []
    for separators in (32, 64):
        pattern = sepllm(
            256, positions="cache", separator_capacity=separators, local_window=224, capacity=324
        )
        for row in read_and_watch(model, pattern, tokens, marks):
            results.append({"separators": separators, **row})
            print(row, flush=True)

    def figure(axes: Any) -> None:
        for column, color in (("us a token", "C0"), ("ms, one token at a time", "C1")):
            for separators, style in ((32, "-"), (64, "--")):
                rows = [row for row in results if row["separators"] == separators]
                axes.plot(
                    [row["tokens"] for row in rows],
                    [row[column] / rows[0][column] for row in rows],
                    color=color,
                    linestyle=style,
                    label=f"{column}, {separators} separators",
                )
        axes.set(xlabel="tokens read", ylabel="over that of the first mark", ylim=(0, None))
        axes.legend(frameon=False)

    write_report(
        "sepllm_million",
        list(results[0]),
        results,
        figure,
        [
            f"{total} tokens in one stream of a random model of two layers, capacity 324, in "
            f"blocks of {BLOCK}; us a token: of the blocks since the mark before; one at a "
            "time: 50 single tokens, tried on a copy of the cache; of both the lowest tenth, which "
            "other work on the machine disturbs least. RSS: resident memory of the process."
        ],
        arguments.output,
    )


def read_and_watch(
    model: jaxlab.Model, pattern: dict[str, Any], tokens: np.ndarray, marks: int
) -> Iterator[dict[str, float]]:
    """Reads a stream in blocks; at each of `marks` equal parts, times and sizes."""
    module = with_attention(model, pattern)
    params = unstack_layers(model.params)

    @jax.jit
    def extend(cache: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
        logits, cache = module.apply({"params": params}, tokens[None], cache=cache)
        return logits[0, -1].argmax(), cache

    def timed(cache: Any, tokens: np.ndarray) -> tuple[float, Any]:
        began = time.perf_counter()
        token, cache = extend(cache, tokens)
        token.block_until_ready()
        return time.perf_counter() - began, cache

    cache = init_cache(module.config, 1, 1, unstacked=True)
    timed(timed(cache, tokens[:BLOCK])[1], tokens[:1])  # compiles
    for part in np.split(tokens.reshape(-1, BLOCK), marks):
        seconds = []
        for block in part:
            taken, cache = timed(cache, block)
            seconds.append(taken)
        singles, tried = [], cache
        for token in part[-1][:50]:
            taken, tried = timed(tried, token[None])
            singles.append(taken)
        yield {
            "tokens": int(cache.lengths[0]),
            "us a token": float(np.quantile(seconds, 0.1)) / BLOCK * 1e6,
            "ms, one token at a time": float(np.quantile(singles, 0.1)) * 1e3,
            "cache KiB": cache.nbytes / 1024,
            "RSS MiB": resident_bytes() / 2**20,
        }


def resident_bytes() -> int:
    """Of this process, as Linux counts them."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    main()
