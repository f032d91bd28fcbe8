"""Core context aware attention (CCA) on a real model without training, and its cost by length.

    python scripts/claims/cca.py --part loss   # or tune, or cost; all: a quarter of an hour
    python scripts/claims/cca.py --part tune --steps 60 --seeds 1 --length 1024
    python scripts/claims/cca.py --quick       # a tiny random model, seconds: a smoke test

CCA (arXiv:2412.12465) sees far tokens through one pooled core token a group. The paper fine-tunes
for 1,000 steps and reports long-context scores near full attention's at a fraction of time and
cache.

Part "loss": SmolLM2-135M as it is, three windows of 2,048 tokens of prose, nats a token over the
last 1,024 of each, with other attention put in. It shows the paper's pooling against mean and
maximum, and that without fine-tuning CCA loses to sinks and a window of the same size: its first
core swallows the first token, which the model leans on. Keeping four first tokens raw, an option of
ours, repairs it.

Part "tune": a short post-training of the attention's weights on other parts of the same text, with
full attention, CCA, and sinks with a window of as many keys as CCA's last query meets; three draws
of the rows. Some steps are no 1,000 of 32 long sequences: what can be seen is whether the gap to
full attention, trained alike, shrinks. Held-out rows are of the same prose as the training rows.

Part "cost": one call of the attention and the bytes of a cache against full attention's, by length,
with the exponent of time fitted over the lengths. Times are of one machine.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import numpy as np
from post_training import report_post_training
from report import write_report
from windows import mean_losses, prose_tokens, windows, with_attention

import jaxlab
from jaxlab.data.tokenizers import ByteTokenizer
from jaxlab.models import ModelConfig, Transformer, init_params
from jaxlab.models.attention.cost import cache_bytes
from pallas_kernels import attention, cca_attention


def cca(group: int, window: int, **options: Any) -> dict[str, Any]:
    return {"pattern": "cca", "group_size": group, "window_size": window, **options}


def sinks_and_window(window: int) -> dict[str, Any]:
    return {"pattern": "sepllm", "separators": "none", "initial_tokens": 4, "window": window}


def cases() -> dict[str, Any]:
    found: dict[str, Any] = {"full": "full"}
    for window in (64, 256):
        found[f"4 sinks + window {window}"] = sinks_and_window(window)
        for group in (4, 16):
            found[f"CCA g={group} s={window}"] = cca(group, window)
            found[f"CCA mean g={group} s={window}"] = cca(group, window, pooling="mean")
    found["CCA max g=4 s=64"] = cca(4, 64, pooling="max")
    for group in (4, 16):
        found[f"CCA + 4 raw sinks g={group} s=256"] = cca(group, 256, sink_tokens=4)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("loss", "tune", "cost", "all"), default="all")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="what jaxlab.load reads")
    parser.add_argument("--steps", type=int, default=6, help="of part tune, for each seed")
    parser.add_argument("--seeds", type=int, default=3, help="draws of part tune's rows")
    parser.add_argument("--length", type=int, default=256, help="tokens of a row of part tune")
    parser.add_argument("--output", default="claims", help="folder for JSON and pictures")
    parser.add_argument("--quick", action="store_true", help="tiny random model, short texts")
    arguments = parser.parse_args()
    for name, part in (("loss", losses), ("tune", tune), ("cost", costs)):
        if arguments.part in (name, "all"):
            part(arguments)


def losses(arguments: argparse.Namespace) -> None:
    if arguments.quick:
        model, length = tiny_model(), 80
        chosen = dict(list(cases().items())[:4])
    else:
        model, length = jaxlab.load(arguments.model), 2048
        chosen = cases()
    rows = windows(prose_tokens(model), length)
    results: list[dict[str, Any]] = []
    for name, pattern in chosen.items():
        module = with_attention(model, pattern)
        each = mean_losses(module, model.params, rows, length // 2)
        full = results[0]["nats"] if results else float(np.mean(each))
        mean = float(np.mean(each))
        row = {"attention": name, "nats": mean, "above full": mean - full}
        row |= {"least": min(each), "most": max(each)}
        results.append(row)
        print(f"{name}: {mean:.3f}", flush=True)

    def figure(axes: Any) -> None:
        names = [row["attention"] for row in results][::-1]
        axes.barh(names, [row["nats"] for row in results][::-1], color="C0")
        axes.axvline(results[0]["nats"], color="grey", linestyle=":")
        axes.set(xlabel="nats a token", xlim=(results[0]["nats"] - 0.2, None))

    write_report(
        "cca_loss",
        ["attention", "nats", "above full", "least", "most"],
        results,
        figure,
        ["No training. Three windows; least and most are of single windows."],
        arguments.output,
    )


def tune(arguments: argparse.Namespace) -> None:
    quick = arguments.quick
    length = 80 if quick else arguments.length
    group, window = 8, length // 8
    keys = round((length - window) / group + window + group / 2)  # of the last query, about
    report_post_training(
        "cca_tune",
        tiny_model() if quick else jaxlab.load(arguments.model),
        {
            "full": ("full", length),
            f"CCA g={group} s={window}": (cca(group, window), keys),
            f"4 sinks + window {keys - 4}": (sinks_and_window(keys - 4), keys),
        },
        length=length,
        steps=2 if quick else arguments.steps,
        seeds=2 if quick else arguments.seeds,
        output=arguments.output,
    )


def costs(arguments: argparse.Namespace) -> None:
    lengths = (128, 256) if arguments.quick else (1024, 2048, 4096, 8192, 16384)
    config = model_of_a_layer()
    shapes: list[dict[str, Any]] = []
    calls = {
        "full": jax.jit(attention),
        "cca": jax.jit(lambda q, k, v: cca_attention(q, k, v, group_size=16, window_size=256)),
    }
    patterns = {"full": "full", "cca": cca(16, 256)}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for length in lengths:
        arrays = [jax.random.normal(jax.random.key(i), (1, length, 8, 64)) for i in range(3)]
        row: dict[str, Any] = {"tokens": length}
        for name, call in calls.items():
            seconds[name].append(median_seconds(call, arrays))
            row[f"{name} s"] = seconds[name][-1]
            changed = config.replace(attention=patterns[name])
            row[f"{name} cache KiB"] = cache_bytes(changed, 1, length) / 1024
        row["times as fast"] = row["full s"] / row["cca s"]
        shapes.append(row)
    half = len(lengths) // 2
    exponents = {
        name: np.polyfit(np.log(lengths[half:]), np.log(times[half:]), 1)[0]
        for name, times in seconds.items()
    }

    def figure(axes: Any) -> None:
        for name, times in seconds.items():
            axes.loglog(lengths, times, "o-", label=f"{name}, exponent {exponents[name]:.2f}")
        axes.set(xlabel="tokens", ylabel="seconds a call")
        axes.legend(frameon=False)

    write_report(
        "cca_cost",
        list(shapes[0]),
        shapes,
        figure,
        [
            "1 x T x 8 heads x 64, float32, g=16, s=256; the cache of one layer, 8 key heads.",
            "Exponents of time over the longer half of the lengths: "
            + ", ".join(f"{name} {value:.2f}" for name, value in exponents.items()),
        ],
        arguments.output,
    )


def model_of_a_layer() -> ModelConfig:
    return ModelConfig(
        vocab_size=512, hidden_size=512, intermediate_size=512, num_layers=1, num_heads=8
    )


def median_seconds(call: Any, arrays: list[jax.Array]) -> float:
    call(*arrays).block_until_ready()
    times = []
    for _ in range(5):
        began = time.perf_counter()
        call(*arrays).block_until_ready()
        times.append(time.perf_counter() - began)
    return float(np.median(times))


def tiny_model() -> jaxlab.Model:
    config = ModelConfig(
        vocab_size=512, hidden_size=32, intermediate_size=64, num_layers=1, num_heads=2
    )
    params = init_params(Transformer(config), jax.random.key(0))
    return jaxlab.Model(Transformer(config), params, ByteTokenizer())


if __name__ == "__main__":
    main()
