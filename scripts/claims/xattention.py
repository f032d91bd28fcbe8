"""How much of the true attention the blocks keep that XAttention chooses, and what it costs.

    python scripts/claims/xattention.py                   # about five minutes on two cores
    python scripts/claims/xattention.py --part selection  # or loss, or speed
    python scripts/claims/xattention.py --quick           # a tiny random model: a smoke test

XAttention (arXiv:2503.16428) scores blocks of keys by sums along the antidiagonals of small tiles,
and attends to the fewest whose estimated share reaches a threshold.

Part "selection": the real queries and keys of SmolLM2-135M's layers on prose. For each stride, and
for other ways to choose as many blocks for each query block, the share of the true attention that
the chosen blocks hold and the relative error of the output.

Part "loss": nats a token over the second half of windows with every layer sparse, against dense.

Part "speed": one call on those queries and keys, scoring included, against our dense attention and
torch's, by length. At the lengths that two cores do in minutes the gain is small: it grows with the
length. On random queries and keys, which have nothing to choose, there is none.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cca import tiny_model
from report import write_report
from windows import mean_losses, prose_tokens, windows, with_attention

import jaxlab
from jaxlab.evaluation.projections import layer_projections
from pallas_kernels import (
    antidiagonal_block_scores,
    attention,
    block_sparse_attention,
    select_blocks,
    xattention,
)

THRESHOLD = 0.9
STARTS = (20_000, 60_000, 80_000, 100_000)  # four windows of the text
Choice = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("selection", "loss", "speed", "all"), default="all")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="what jaxlab.load reads")
    parser.add_argument("--layers", type=int, default=6, help="of the selection, evenly spread")
    parser.add_argument(
        "--lengths", type=int, nargs="+", help="of part speed (default: 2048 4096 8192)"
    )
    parser.add_argument("--output", default="claims", help="folder for JSON and pictures")
    parser.add_argument("--quick", action="store_true", help="tiny random model, short texts")
    arguments = parser.parse_args()
    model = tiny_model() if arguments.quick else jaxlab.load(arguments.model)
    for name, part in (("selection", selection), ("loss", loss), ("speed", speed)):
        if arguments.part in (name, "all"):
            part(arguments, model)


def block_of(arguments: argparse.Namespace) -> int:
    return 16 if arguments.quick else 64


def strides_of(arguments: argparse.Namespace) -> tuple[int, ...]:
    return (4, 16) if arguments.quick else (4, 8, 16, 64)


def selection(arguments: argparse.Namespace, model: jaxlab.Model) -> None:
    block = block_of(arguments)
    rows = windows(prose_tokens(model), 80 if arguments.quick else 2048, STARTS)
    ways = choices(block, strides_of(arguments))
    sums: dict[str, list[list[float]]] = {name: [] for name in ways}
    wanted = set(np.linspace(0, model.config.num_layers - 1, arguments.layers).astype(int).tolist())

    @jax.jit
    def measure(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array):
        """Density, kept share of the true attention, relative error of the output."""
        out = block_sparse_attention(q, k, v, mask, block_size=block)
        dense = attention(q, k, v)
        true = true_block_sums(q, k, block)
        causal = jnp.tri(mask.shape[-1], dtype=bool)
        kept = jnp.sum(jnp.where(mask, true, 0)) / jnp.sum(true)
        density = jnp.mean(mask, where=jnp.broadcast_to(causal, mask.shape))
        return density, kept, jnp.linalg.norm(out - dense) / jnp.linalg.norm(dense)

    for row in rows:
        for index, (q, k, v) in enumerate(layer_projections(model, row[None])):
            if index not in wanted:
                continue
            first = None  # how many blocks each query block gets, in the ways that follow
            for name, choose in ways.items():
                mask = choose(q, k, first)
                first = mask.sum(-1) if name == f"antidiagonal, stride {MAIN}" else first
                sums[name].append([float(x) for x in measure(q, k, v, mask)])
    results = []
    for name, values in sums.items():
        density, kept, error = np.mean(values, axis=0)
        results.append(
            {
                "choice": name,
                "density": float(density),
                "true attention kept": float(kept),
                "output error": float(error),
            }
        )

    def figure(axes: Any) -> None:
        for row in results:
            axes.plot(row["density"], row["true attention kept"], "o", label=row["choice"])
        axes.set(xlabel="density", ylabel="share of the true attention kept")
        axes.legend(frameon=False, fontsize=8)

    write_report(
        "xattention_selection",
        ["choice", "density", "true attention kept", "output error"],
        results,
        figure,
        [
            f"Threshold {THRESHOLD}, blocks of {block}, {len(rows)} windows of {rows.shape[1]} "
            f"tokens, layers {sorted(wanted)}. The last rows choose as many blocks for each query "
            f"block as the antidiagonal with stride {MAIN} did.",
        ],
        arguments.output,
    )


MAIN = 4  # the stride whose numbers of blocks the other ways get


def choices(block: int, strides: tuple[int, ...]) -> dict[str, Choice]:
    """Ways to choose blocks; those after the first stride's are given its numbers of blocks."""

    def by_threshold(stride: int, pattern: str = "antidiagonal") -> Choice:
        @jax.jit
        def choose(q: jax.Array, k: jax.Array, _: Any) -> jax.Array:
            scores = antidiagonal_block_scores(
                q, k, block_size=block, stride=stride, pattern=pattern
            )
            return select_blocks(scores, THRESHOLD)

        return choose

    def by_count(score: Callable[[jax.Array, jax.Array], jax.Array]) -> Choice:
        @jax.jit
        def choose(q: jax.Array, k: jax.Array, counts: jax.Array) -> jax.Array:
            return best(score(q, k), counts)

        return choose

    def recent(q: jax.Array, k: jax.Array) -> jax.Array:
        count = -(-q.shape[1] // block)
        return jnp.broadcast_to(jnp.arange(count) * 1.0, (q.shape[0], q.shape[2], count, count))

    def random(q: jax.Array, k: jax.Array) -> jax.Array:
        count = -(-q.shape[1] // block)
        return jax.random.uniform(jax.random.key(0), (q.shape[0], q.shape[2], count, count))

    def pooled(q: jax.Array, k: jax.Array) -> jax.Array:
        means = [block_means(x, block) for x in (q, k)]
        keys = jnp.repeat(means[1], q.shape[2] // k.shape[2], axis=2)
        return jnp.einsum("bihd,bjhd->bhij", means[0], keys)

    return {
        **{f"antidiagonal, stride {stride}": by_threshold(stride) for stride in strides},
        f"main diagonal, stride {MAIN}": by_threshold(MAIN, "diagonal"),
        "means of blocks, same number": by_count(pooled),
        "most recent, same number": by_count(recent),
        "random, same number": by_count(random),
    }


def best(scores: jax.Array, counts: jax.Array) -> jax.Array:
    """The `counts [B, H, NQ]` blocks of highest score, the first and the query's own among them."""
    count = scores.shape[-1]
    row, column = jnp.arange(count)[:, None], jnp.arange(count)
    scores = jnp.where((column == row) | (column == 0), jnp.inf, scores)
    scores = jnp.where(column <= row, scores, -jnp.inf)
    rank = jnp.argsort(jnp.argsort(-scores, axis=-1, stable=True), axis=-1, stable=True)
    return (rank < counts[..., None]) & (column <= row)


def block_means(x: jax.Array, block: int) -> jax.Array:
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % block), (0, 0), (0, 0)))
    return x.reshape(x.shape[0], -1, block, *x.shape[2:]).mean(2)


def true_block_sums(q: jax.Array, k: jax.Array, block: int) -> jax.Array:
    """Exact probabilities summed over blocks, `[B, H, NQ, NK]`; dense, so for short texts."""
    keys = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
    logits = jnp.einsum("bthd,bshd->bhts", q, keys) * q.shape[-1] ** -0.5
    logits = jnp.where(jnp.tri(q.shape[1], dtype=bool), logits, -jnp.inf)
    weights = jax.nn.softmax(logits)
    padding = -q.shape[1] % block
    weights = jnp.pad(weights, ((0, 0), (0, 0), (0, padding), (0, padding)))
    count = weights.shape[-1] // block
    return weights.reshape(*weights.shape[:2], count, block, count, block).sum((3, 5))


def loss(arguments: argparse.Namespace, model: jaxlab.Model) -> None:
    rows = windows(prose_tokens(model), 80 if arguments.quick else 2048, STARTS)
    scored = rows.shape[1] // 2
    block = block_of(arguments)
    dense = mean_losses(with_attention(model, "full"), model.params, rows, scored)
    results = [
        {
            "threshold": "dense",
            "stride": "-",
            "density": 1.0,
            "nats": float(np.mean(dense)),
            "above": 0.0,
        }
    ]
    cases = [(0.9, 8)] if arguments.quick else [(0.8, 8), (0.9, 8), (0.95, 8), (0.9, 16)]
    for threshold, stride in cases:
        pattern = {
            "pattern": "xattention",
            "block_size": block,
            "stride": stride,
            "threshold": threshold,
        }
        each = mean_losses(with_attention(model, pattern), model.params, rows, scored)
        nats = float(np.mean(each))
        above = nats - results[0]["nats"]
        kept = mean_density(model, pattern, rows)
        results.append(
            {
                "threshold": threshold,
                "stride": stride,
                "density": kept,
                "nats": nats,
                "above": above,
            }
        )
        print(
            f"threshold {threshold}, stride {stride}: {above:+.3f} nats at density {kept:.3f}",
            flush=True,
        )
    write_report(
        "xattention_loss",
        ["threshold", "stride", "density", "nats", "above"],
        results,
        None,
        [f"All layers sparse, blocks of {block}, no training."],
        arguments.output,
    )


def mean_density(model: jaxlab.Model, pattern: dict[str, Any], rows: np.ndarray) -> float:
    """Chosen blocks over causal ones; mean over windows, layers and heads of the sparse model."""
    sparse = SimpleNamespace(config=model.config.replace(attention=pattern), params=model.params)

    @jax.jit
    def density(q: jax.Array, k: jax.Array) -> jax.Array:
        scores = antidiagonal_block_scores(
            q, k, block_size=pattern["block_size"], stride=pattern["stride"]
        )
        mask = select_blocks(scores, pattern["threshold"])
        causal = jnp.tri(mask.shape[-1], dtype=bool)
        return jnp.mean(mask, where=jnp.broadcast_to(causal, mask.shape))

    layers = (layer for row in rows for layer in layer_projections(sparse, row[None]))
    return float(np.mean([density(q, k) for q, k, _ in layers]))


def speed(arguments: argparse.Namespace, model: jaxlab.Model) -> None:
    layer = model.config.num_layers // 2
    lengths = arguments.lengths or ((64, 128) if arguments.quick else (2048, 4096, 8192))
    text = prose_tokens(model)
    results = []
    for length in lengths:
        projections = layer_projections(model, text[None, :length])
        q, k, v = next(p for index, p in enumerate(projections) if index == layer)
        sparse = jax.jit(
            lambda q, k, v: xattention(
                q, k, v, threshold=THRESHOLD, stride=16, block_size=128, return_density=True
            )
        )
        dense = jax.jit(attention)
        row = {"tokens": length, "density": float(sparse(q, k, v)[1].mean())}
        row["dense s"] = median_seconds(dense, q, k, v)
        row["xattention s"] = median_seconds(sparse, q, k, v)
        row["times as fast"] = row["dense s"] / row["xattention s"]
        if importlib.util.find_spec("torch") is not None:
            row["torch s"] = torch_seconds(q, k, v)
            row["times as fast as torch"] = row["torch s"] / row["xattention s"]
        results.append(row)

    def figure(axes: Any) -> None:
        for name in (name for name in results[0] if name.endswith(" s")):
            axes.loglog(lengths, [row[name] for row in results], "o-", label=name[:-2])
        axes.set(xlabel="tokens", ylabel="seconds a call, scoring included")
        axes.legend(frameon=False)

    write_report(
        "xattention_speed",
        list(results[0]),
        results,
        figure,
        [f"Layer {layer}'s own queries and keys; stride 16, blocks of 128, float32."],
        arguments.output,
    )


def torch_seconds(*arrays: jax.Array) -> float:
    """Of torch's dense attention on the same arrays, on all cores."""
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    q, k, v = (torch.tensor(np.asarray(x)).transpose(1, 2).contiguous() for x in arrays)
    call = torch.nn.functional.scaled_dot_product_attention
    grouped = q.shape[1] != k.shape[1]
    return median_seconds(lambda: call(q, k, v, is_causal=True, enable_gqa=grouped))


def median_seconds(call: Any, *arrays: jax.Array) -> float:
    jax.block_until_ready(call(*arrays))
    times = []
    for _ in range(3):
        began = time.perf_counter()
        jax.block_until_ready(call(*arrays))
        times.append(time.perf_counter() - began)
    return float(np.median(times))


if __name__ == "__main__":
    main()
