"""One layer learns induction if keys and values are shifted, and does not if they are not.

    python scripts/claims/kv_shifting.py                    # about four minutes on two cores
    python scripts/claims/kv_shifting.py --seeds 1 --steps 150
    python scripts/claims/kv_shifting.py --quick            # seconds: a smoke test, proves nothing

The claim is of KV shifting attention (arXiv:2411.19574, figure 1): "find the earlier occurrence of
this token and output what followed it" needs two layers of ordinary attention, and one with shifted
keys. Data by its appendix D: a row repeats tokens it draws; after a token that was there before
comes what followed it first. The score is the accuracy at the first repeat of 512 fresh rows, after
training on repeats alone.

Chance is not one in the vocabulary: who guesses a token of the row is right about one time in six.
What this shows is the mechanism, at a size where it takes seconds. It says nothing of language.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from report import write_report

from jaxlab.models import ModelConfig, Transformer, init_params
from jaxlab.models.attention.shift import effective_taps

VOCABULARY, LENGTH, CANDIDATES, FIRST = 256, 32, 32, 11
PADDING = 0
VARIANTS: dict[str, dict[str, Any]] = {
    "1 layer, plain": {"num_layers": 1},
    "1 layer, shifted": {"num_layers": 1, "kv_shift": {}},
    "1 layer, keys only": {"num_layers": 1, "kv_shift": {"values": False}},
    "1 layer, values only": {"num_layers": 1, "kv_shift": {"keys": False}},
    "2 layers, plain": {"num_layers": 2},
}
SEVERAL_SEEDS = ("1 layer, plain", "1 layer, shifted")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300, help="updates of each model")
    parser.add_argument("--seeds", type=int, default=3, help="of the first two rows")
    parser.add_argument("--output", default="claims", help="folder for JSON and picture")
    parser.add_argument("--quick", action="store_true", help="20 steps of two models")
    arguments = parser.parse_args()
    steps = 20 if arguments.quick else arguments.steps
    rng = np.random.default_rng(1)
    test = first_repeats(*rows(rng, 64 if arguments.quick else 512))
    chance = float(np.mean([1 / len(set(row[: at + 1])) for row, at, _ in zip(*test, strict=True)]))

    results, curves = [], {}
    for name, changes in VARIANTS.items():
        if arguments.quick and name not in SEVERAL_SEEDS:
            continue
        for seed in range(arguments.seeds if name in SEVERAL_SEEDS else 1):
            curve, params, config = train(changes, seed, steps, test)
            curves[name, seed] = curve
            results.append(
                {
                    "model": name,
                    "seed": seed,
                    **{f"at {step}": accuracy for step, accuracy in curve if step % 100 == 0},
                    f"at {steps}": curve[-1][1],
                    "key taps": taps_of(params, config, "key"),
                    "value taps": taps_of(params, config, "value"),
                }
            )
            print(f"{name}, seed {seed}: accuracy {curve[-1][1]:.3f}", flush=True)

    def figure(axes: Any) -> None:
        for (name, seed), curve in curves.items():
            color = f"C{list(VARIANTS).index(name)}"
            axes.plot(*zip(*curve, strict=True), color=color, label=name if seed == 0 else None)
        axes.axhline(chance, color="grey", linestyle=":", label="a guess among the row's tokens")
        axes.set(xlabel="step", ylabel="accuracy at the first repeat", ylim=(0, 1.02))
        axes.legend(frameon=False)

    marks = sorted({key for row in results for key in row if key.startswith("at ")}, key=len)
    write_report(
        "kv_shifting",
        ["model", "seed", *sorted(marks, key=lambda m: int(m[3:])), "key taps", "value taps"],
        results,
        figure,
        [
            f"A guess among the tokens of the row so far is right {chance:.1%} of the time.",
            "Taps are [previous, present] of each key head. The claim is that keys move to the "
            "previous token: a key then says what came before it.",
        ],
        arguments.output,
    )


def rows(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """`count` rows of tokens, int `[count, LENGTH]`, and the token each repeat must be followed by.

    The second array is -1 where nothing is asked. Redrawn until each row has a repeat.
    """
    tokens = np.full((count, LENGTH), PADDING)
    answers = np.full((count, LENGTH), -1)
    for row in range(count):
        while (answers[row] < 0).all():
            tokens[row], answers[row] = one_row(rng)
    return tokens, answers


def one_row(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    candidates = rng.choice(np.arange(FIRST, VOCABULARY), CANDIDATES, replace=False)
    row: list[int] = []
    answers = np.full(LENGTH, -1)
    follower: dict[int, int] = {}
    while len(row) < LENGTH:
        token = int(rng.choice(candidates))
        if row and token == row[-1]:
            continue
        if row:
            follower.setdefault(row[-1], token)
        seen = token in row
        row.append(token)
        if seen and len(row) < LENGTH:
            answers[len(row) - 1] = follower[token]
            row.append(follower[token])
    return np.asarray(row), answers


def first_repeats(
    tokens: np.ndarray, answers: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, the place of each row's first repeat, and the right answer there."""
    at = (answers >= 0).argmax(1)
    return tokens, at, answers[np.arange(len(at)), at]


def train(
    changes: dict[str, Any], seed: int, steps: int, test: tuple[np.ndarray, ...]
) -> tuple[list[tuple[int, float]], Any, ModelConfig]:
    """Accuracy on `test` every 20 steps, the parameters, the configuration."""
    config = ModelConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_heads=4, **changes
    )
    module = Transformer(config)
    params = init_params(module, jax.random.key(seed))
    optimizer = optax.adamw(optax.linear_schedule(0.0, 3e-3, 30), b1=0.9, b2=0.95, weight_decay=0.1)
    state = optimizer.init(params)

    @partial(jax.jit, donate_argnums=(0, 1))
    def update(params: Any, state: Any, tokens: jax.Array, answers: jax.Array):
        def loss(params: Any) -> jax.Array:
            logits = module.apply({"params": params}, tokens)
            asked = answers >= 0
            losses = optax.softmax_cross_entropy_with_integer_labels(
                logits, jnp.where(asked, answers, 0)
            )
            return jnp.sum(losses * asked) / jnp.sum(asked)

        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    @jax.jit
    def accuracy(params: Any) -> jax.Array:
        tokens, at, answers = test
        logits = module.apply({"params": params}, tokens)
        chosen = logits[jnp.arange(len(at)), at].argmax(-1)
        return jnp.mean(chosen == answers)

    rng = np.random.default_rng(100 + seed)
    curve = []
    for step in range(1, steps + 1):
        params, state = update(params, state, *rows(rng, 64))
        if step % 20 == 0 or step == steps:
            curve.append((step, float(accuracy(params))))
    return curve, params, config


def taps_of(params: Any, config: ModelConfig, name: str) -> str:
    """The first layer's coefficients of each head, for the table."""
    shift = config.kv_shift
    if shift is None or name not in shift.shifted:
        return "-"
    taps = effective_taps(params["layers"]["attention"][f"{name}_shift"][0], shift)
    return " ".join("[" + ", ".join(f"{x:.2f}" for x in head) + "]" for head in np.asarray(taps))


if __name__ == "__main__":
    main()
