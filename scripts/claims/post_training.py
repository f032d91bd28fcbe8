"""A short post-training of SmolLM2's attention projections with another attention put in."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from report import write_report
from windows import STARTS, mean_losses, prose_tokens, windows, with_attention

import jaxlab
from jaxlab.objectives import language_modeling
from jaxlab.training.optimizers import OptimizerConfig, make_optimizer
from jaxlab.training.step import TrainState, make_train_step

TRAINED = ("attention",)  # the rest of the model stays as it is
HELD_OUT = 4096  # tokens from each start of `windows.STARTS` on that are never trained on


def training_rows(tokens: np.ndarray, length: int, count: int, seed: int) -> np.ndarray:
    """int32 `[count, length + 1]`, of random places that touch no held-out text."""
    starts = np.arange(len(tokens) - length)
    for held_out in STARTS:
        starts = starts[(starts + length < held_out) | (starts >= held_out + HELD_OUT)]
    chosen = np.random.default_rng(seed).choice(starts, count)
    return np.stack([tokens[start : start + length + 1] for start in chosen])


def post_train(
    model: jaxlab.Model, pattern: Any, rows_by_seed: Sequence[np.ndarray], evaluated: np.ndarray
) -> tuple[float, list[float]]:
    """Nats a token of `evaluated`'s second halves: before, and after one row a step, by seed."""
    module = with_attention(model, pattern)
    steps = len(rows_by_seed[0])
    config = OptimizerConfig(
        learning_rate=1e-4, schedule="constant", warmup_steps=min(3, steps - 1), weight_decay=0.0
    )
    optimizer = make_optimizer(config, steps=steps, only=TRAINED)
    step = jax.jit(make_train_step(language_modeling(module), optimizer, only=TRAINED))
    measure = partial(mean_losses, module, tokens=evaluated, scored=evaluated.shape[1] // 2)

    def trained(rows: np.ndarray) -> Any:
        state = TrainState.create(model.params, optimizer, jax.random.key(0))
        for row in rows:
            state, _ = step(state, {"tokens": row[None, :-1], "targets": row[None, 1:]})
        return state.params

    before, *after = (
        float(np.mean(measure(params))) for params in (model.params, *map(trained, rows_by_seed))
    )
    return before, after


def report_post_training(
    name: str,
    model: jaxlab.Model,
    cases: dict[str, tuple[Any, float]],
    *,
    length: int,
    steps: int,
    seeds: int,
    output: str,
) -> None:
    """Trains each case on the same rows; the first is the one that gaps are counted from.

    Args:
      cases: name → attention, and how many keys the last query meets.
    """
    if length > HELD_OUT:
        raise SystemExit(f"--length {length}: at most {HELD_OUT}, what is held out at each place")
    tokens = prose_tokens(model)
    evaluated = windows(tokens, length)
    rows_by_seed = [training_rows(tokens, length, steps, seed) for seed in range(seeds)]
    results: list[dict[str, Any]] = []
    for case, (pattern, keys) in cases.items():
        before, after = post_train(model, pattern, rows_by_seed, evaluated)
        row: dict[str, Any] = {"attention": case, "keys": keys, "before": before}
        row |= {f"after, seed {seed}": nats for seed, nats in enumerate(after)}
        row["after"] = float(np.mean(after))
        for when in ("before", "after"):
            row[f"gap {when}"] = row[when] - (results[0][when] if results else row[when])
        results.append(row)
        print(f"{case}: {before:.3f} before, {row['after']:.3f} after", flush=True)

    def figure(axes: Any) -> None:
        for row in results[1:]:
            axes.plot(
                [0, steps], [row["gap before"], row["gap after"]], "o-", label=row["attention"]
            )
        axes.set(xlabel="steps", ylabel="nats above full attention, trained alike", ylim=(0, None))
        axes.legend(frameon=False)

    write_report(
        name,
        list(results[0]),
        results,
        figure,
        [
            f"{steps} steps of AdamW at 1e-4 on one row of {length} tokens of the same text, of "
            f"the {' and '.join(TRAINED)} weights alone; scored: the second halves of "
            f"{len(evaluated)} windows that were held out. Gaps are to full attention before and "
            "to full attention trained alike after.",
        ],
        output,
    )
