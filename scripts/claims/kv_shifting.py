"""One layer learns induction if keys and values are shifted, and does not if they are not.

    python scripts/claims/kv_shifting.py                        # about four minutes on two cores
    python scripts/claims/kv_shifting.py --experiment width8    # or hops, ablations, coefficients
    python scripts/claims/kv_shifting.py --quick                # a smoke test, proves nothing

The claim is of KV shifting attention (arXiv:2411.19574, figure 1): "find the earlier occurrence of
this token and output what followed it" needs two layers of ordinary attention, and one with shifted
keys. Data by its appendix D: a row repeats tokens it draws; after a token that was there before
comes what followed it first. The score is the accuracy at the first repeat of 512 fresh rows.

Experiments:
  induction     width 64, trained on what follows repeats: plain, shifted, keys or values alone, two
                plain layers, which learn later. Prints the learnt coefficients too.
  coefficients  the shifted model alone, one line a head, and how many heads weigh the previous
                token more than the present one.
  ablations     coefficients as a gate or clipped to [0, 1], and windows of 3 and 4 tokens.
  width8        one head of width 8, trained on every token of longer rows (figure 1b).
  hops          hop-k: follow k induction steps from every token; error by k, two and three layers,
                one seed by default.

Chance is not one in the vocabulary: who guesses a token of the row is right about one time in six.
What this shows is the mechanism, at a size where it takes seconds. It says nothing of language.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from report import write_report
from sequences import (
    CHARACTERS,
    NOT_ASKED,
    UNDEFINED,
    Batch,
    chance,
    first_repeats,
    hop_rows,
    induction_rows,
    next_tokens,
)

from jaxlab.models import ModelConfig, Transformer, init_params
from jaxlab.models.attention.shift import effective_taps

PLAIN, SHIFTED = "1 layer, plain", "1 layer, shifted"
INDUCTION: dict[str, dict[str, Any]] = {
    PLAIN: {"num_layers": 1},
    SHIFTED: {"num_layers": 1, "kv_shift": {}},
    "1 layer, keys only": {"num_layers": 1, "kv_shift": {"values": False}},
    "1 layer, values only": {"num_layers": 1, "kv_shift": {"keys": False}},
    "2 layers, plain": {"num_layers": 2},
}
ABLATIONS: dict[str, dict[str, Any]] = {
    SHIFTED: {"num_layers": 1, "kv_shift": {}},
    "gate": {"num_layers": 1, "kv_shift": {"constraint": "gate"}},
    "clipped": {"num_layers": 1, "kv_shift": {"constraint": "clip"}},
    "window of 3": {"num_layers": 1, "kv_shift": {"window": 3}},
    "window of 4": {"num_layers": 1, "kv_shift": {"window": 4}},
}
NARROW = {"hidden_size": 8, "intermediate_size": 16, "num_heads": 1}
WIDTH8: dict[str, dict[str, Any]] = {
    SHIFTED: {"num_layers": 1, "kv_shift": {}, **NARROW},
    "2 layers, plain": {"num_layers": 2, **NARROW},
}
HOPS: dict[str, dict[str, Any]] = {
    "2 layers, plain": {"num_layers": 2},
    "2 layers, shifted": {"num_layers": 2, "kv_shift": {}},
    "3 layers, plain": {"num_layers": 3},
    "3 layers, shifted": {"num_layers": 3, "kv_shift": {}},
}
SEVERAL_SEEDS = (PLAIN, SHIFTED)
MAX_HOPS = 3


@dataclasses.dataclass(frozen=True)
class Task:
    """Fresh rows to train on and fixed ones to be judged on."""

    draw: Callable[[np.random.Generator, int], Batch]
    test: Batch
    vocabulary: int
    steps: int
    rate: float = 3e-3
    warmup: int = 30


def induction_task(test_rows: int) -> Task:
    draw = partial(induction_rows, length=32, vocabulary=256, candidates=32)
    test = first_repeats(draw(np.random.default_rng(1), test_rows))
    return Task(draw, test, 256, 300)


def long_induction_task(test_rows: int) -> Task:
    draw = partial(induction_rows, length=64, vocabulary=512, candidates=64)
    test = first_repeats(draw(np.random.default_rng(1), test_rows))
    return Task(lambda rng, count: next_tokens(draw(rng, count)), test, 512, steps=1500, warmup=100)


def hops_task(test_rows: int) -> Task:
    draw = partial(hop_rows, length=30, max_hops=MAX_HOPS)
    test = draw(np.random.default_rng(1), test_rows)
    return Task(draw, test, CHARACTERS + MAX_HOPS + 2, steps=1500, rate=1e-3, warmup=100)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--experiment",
        choices=("induction", "coefficients", "ablations", "width8", "hops"),
        default="induction",
    )
    parser.add_argument("--steps", type=int, help="updates of each model (default: 300, or 1500)")
    parser.add_argument("--seeds", type=int, help="of the rows that are random enough (default 3)")
    parser.add_argument("--output", default="claims", help="folder for JSON and picture")
    parser.add_argument("--quick", action="store_true", help="20 steps of the first two models")
    arguments = parser.parse_args()
    test_rows = 64 if arguments.quick else 512
    if arguments.experiment == "hops":
        hops(arguments, hops_task(test_rows))
    elif arguments.experiment == "width8":
        induction(arguments, "kv_shifting_width8", long_induction_task(test_rows), WIDTH8)
    elif arguments.experiment == "ablations":
        induction(arguments, "kv_shifting_ablations", induction_task(test_rows), ABLATIONS)
    elif arguments.experiment == "coefficients":
        coefficients(arguments, induction_task(test_rows))
    else:
        induction(arguments, "kv_shifting", induction_task(test_rows), INDUCTION)


def runs(
    arguments: argparse.Namespace, variants: dict[str, dict[str, Any]], several: tuple[str, ...]
) -> list[tuple[str, int]]:
    """Name and seed of each run."""
    names = list(variants)[:2] if arguments.quick else list(variants)
    seeds = arguments.seeds or (1 if arguments.quick else 3)
    return [(name, seed) for name in names for seed in range(seeds if name in several else 1)]


def steps_of(arguments: argparse.Namespace, task: Task) -> int:
    return arguments.steps or (20 if arguments.quick else task.steps)


def induction(
    arguments: argparse.Namespace, name: str, task: Task, variants: dict[str, dict[str, Any]]
) -> None:
    steps = steps_of(arguments, task)
    several = SEVERAL_SEEDS if variants is INDUCTION else tuple(variants)
    every = 100 if steps <= 600 else 500
    results, curves, shifted = [], {}, []
    for model, seed in runs(arguments, variants, several):
        curve, params, config = train(task, variants[model], seed, steps)
        curves[model, seed] = curve
        if model == SHIFTED:
            shifted.append((params, config))
        results.append(
            {
                "model": model,
                "seed": seed,
                **{f"at {step}": accuracy for step, accuracy in curve if step % every == 0},
                f"at {steps}": curve[-1][1],
                "key taps": taps_text(params, config, "key"),
                "value taps": taps_text(params, config, "value"),
            }
        )
        print(f"{model}, seed {seed}: accuracy {curve[-1][1]:.3f}", flush=True)
    guess = chance(task.test)

    def figure(axes: Any) -> None:
        for (model, seed), curve in curves.items():
            color = f"C{list(variants).index(model)}"
            axes.plot(*zip(*curve, strict=True), color=color, label=model if seed == 0 else None)
        axes.axhline(guess, color="grey", linestyle=":", label="a guess among the row's tokens")
        axes.set(xlabel="step", ylabel="accuracy at the first repeat", ylim=(0, 1.02))
        axes.legend(frameon=False)

    marks = {key for row in results for key in row if key.startswith("at ")}
    write_report(
        name,
        ["model", "seed", *sorted(marks, key=lambda m: int(m[3:])), "key taps", "value taps"],
        results,
        figure,
        [
            f"A guess among the tokens of the row so far is right {guess:.1%} of the time.",
            "Taps are the coefficients of each key head, oldest token first, the present one last.",
            *[leanings_text(heads) for heads in [head_taps(shifted)] if heads],
        ],
        arguments.output,
    )


def coefficients(arguments: argparse.Namespace, task: Task) -> None:
    trained = [
        train(task, INDUCTION[SHIFTED], seed, steps_of(arguments, task))[1:]
        for _, seed in runs(arguments, {SHIFTED: {}}, SEVERAL_SEEDS)
    ]
    heads = head_taps(trained)

    def figure(axes: Any) -> None:
        for name, color in (("key", "C0"), ("value", "C1")):
            points = [(row[f"{name}, previous"], row[f"{name}, present"]) for row in heads]
            axes.plot(*zip(*points, strict=True), "o", color=color, label=f"{name}s")
        axes.axline((0, 0), slope=1, color="grey", linestyle=":")
        axes.set(xlabel="coefficient of the previous token", ylabel="of the present token")
        axes.legend(frameon=False)

    write_report(
        "kv_shifting_coefficients",
        list(heads[0]),
        heads,
        figure,
        [leanings_text(heads)],
        arguments.output,
    )


def hops(arguments: argparse.Namespace, task: Task) -> None:
    results = []
    several = tuple(HOPS) if arguments.seeds else ()
    for model, seed in runs(arguments, HOPS, several):
        _, params, config = train(task, HOPS[model], seed, steps_of(arguments, task))
        predicted = Transformer(config).apply({"params": params}, task.test.tokens).argmax(-1)
        wrong = np.asarray(predicted) != task.test.answers
        asked = task.test.answers != NOT_ASKED
        hop = task.test.tokens[:, :1] - UNDEFINED - 1
        errors = {
            f"error, {k} hops": float(wrong[asked & (hop == k)].mean()) for k in range(MAX_HOPS + 1)
        }
        results.append({"model": model, "seed": seed, **errors})
        print(f"{model}, seed {seed}: {list(errors.values())}", flush=True)

    def figure(axes: Any) -> None:
        for row in results:
            values = [row[f"error, {k} hops"] for k in range(MAX_HOPS + 1)]
            style = "--" if "plain" in row["model"] else "-"
            axes.plot(values, style, color=f"C{row['model'][0]}", label=row["model"])
        axes.set(xlabel="hops", ylabel="error over all places", xticks=range(MAX_HOPS + 1))
        axes.legend(frameon=False)

    write_report(
        "kv_shifting_hops",
        list(results[0]),
        results,
        figure,
        ["Length 30, width 64, four characters: far smaller than the paper's figure 9."],
        arguments.output,
    )


def train(
    task: Task, changes: dict[str, Any], seed: int, steps: int
) -> tuple[list[tuple[int, float]], Any, ModelConfig]:
    """Accuracy on the task's test every 20 steps, the parameters, the configuration."""
    config = ModelConfig(
        **{
            "vocab_size": task.vocabulary,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            **changes,
        }
    )
    module = Transformer(config)
    params = init_params(module, jax.random.key(seed))
    optimizer = optax.adamw(
        optax.linear_schedule(0.0, task.rate, task.warmup), b1=0.9, b2=0.95, weight_decay=0.1
    )
    state = optimizer.init(params)

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(params: Any, state: Any, batch: Batch) -> tuple[Any, Any]:
        def loss(params: Any) -> jax.Array:
            logits = module.apply({"params": params}, batch.tokens)
            asked = batch.answers != NOT_ASKED
            losses = optax.softmax_cross_entropy_with_integer_labels(
                logits, jnp.where(asked, batch.answers, 0)
            )
            return jnp.sum(losses * asked) / jnp.sum(asked)

        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def accuracy(params: Any) -> jax.Array:
        chosen = module.apply({"params": params}, task.test.tokens).argmax(-1)
        return jnp.mean(chosen == task.test.answers, where=task.test.answers != NOT_ASKED)

    rng = np.random.default_rng(100 + seed)
    curve = []
    for step in range(1, steps + 1):
        params, state = update(params, state, task.draw(rng, 64))
        if step % 20 == 0 or step == steps:
            curve.append((step, float(accuracy(params))))
    return curve, params, config


def taps(params: Any, config: ModelConfig, name: str) -> np.ndarray | None:
    """The first layer's coefficients `[Hk, window]` of "key" or "value"; None if unshifted."""
    shift = config.kv_shift
    if shift is None or name not in shift.shifted:
        return None
    return np.asarray(effective_taps(params["layers"]["attention"][f"{name}_shift"][0], shift))


def taps_text(params: Any, config: ModelConfig, name: str) -> str:
    heads = taps(params, config, name)
    if heads is None:
        return "-"
    return " ".join("[" + ", ".join(f"{x:.2f}" for x in head) + "]" for head in heads)


def head_taps(trained: list[tuple[Any, ModelConfig]]) -> list[dict[str, float]]:
    """One row a head of each model, all of window 2 with both keys and values shifted."""
    rows = []
    for seed, (params, config) in enumerate(trained):
        keys, values = taps(params, config, "key"), taps(params, config, "value")
        assert keys is not None
        assert values is not None
        for head, (key, value) in enumerate(zip(keys.tolist(), values.tolist(), strict=True)):
            rows.append(
                {
                    "seed": seed,
                    "head": head,
                    "key, previous": key[0],
                    "key, present": key[1],
                    "value, previous": value[0],
                    "value, present": value[1],
                }
            )
    return rows


def leanings_text(heads: list[dict[str, float]]) -> str:
    """How many heads lean which way, as the paper counts those of its language models."""
    keys = np.array([row["key, present"] > row["key, previous"] for row in heads])
    values = np.array([row["value, present"] > row["value, previous"] for row in heads])
    return (
        f"Of {len(heads)} heads: keys and values of the present token {np.sum(keys & values)}; "
        f"keys of the previous and values of the present {np.sum(~keys & values)} (induction); "
        f"keys of the present and values of the previous {np.sum(keys & ~values)}; "
        f"both of the previous {np.sum(~keys & ~values)}."
    )


if __name__ == "__main__":
    main()
