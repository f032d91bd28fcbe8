"""A key hidden in a long text: does the model find it again? By length and depth."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlab.errors import ConfigError
from jaxlab.inference import SamplingParams

QUESTION = "\nThe pass key is"
NUM_DECOYS = 4


class NeedleCell(NamedTuple):
    """One length and depth.

    Attributes:
      length: tokens of the whole prompt.
      depth: where the needle stands, 0 at the beginning, 100 at the end, in percent.
      accuracy: share of trials in which the key was likelier than each decoy; chance is one in
        `NUM_DECOYS + 1`.
      log_odds: mean log-probability of the key less that of the likeliest decoy, in nats.
      generated: share of trials in which greedy decoding wrote the key.
    """

    length: int
    depth: float
    accuracy: float
    log_odds: float
    generated: float


def needle(
    model: Any,
    hay: str,
    *,
    lengths: Sequence[int],
    depths: Sequence[float] = (0, 25, 50, 75, 100),
    trials: int = 3,
    seed: int = 0,
    progress: Callable[[NeedleCell], None] | None = None,
) -> list[NeedleCell]:
    """Passkey retrieval (Mohtashami and Jaggi 2023, arXiv:2305.16300).

    A prompt of `length` tokens is prose with the sentence "The pass key is 12345." at `depth`, and
    "The pass key is" at its end. The key is scored against decoy numbers by log-probability, which
    says something of models that are too small to write it, and looked for in what is generated.

    Args:
      model: as `jaxlab.load` gives, with a tokenizer.
      hay: prose; repeated where it is too short.
      lengths: tokens of the prompts; within the model's context.
      depths: percent.
      trials: keys and stretches of hay a cell.
      seed: of keys and hay.
      progress: called with each finished cell.

    Raises:
      ConfigError: a length or depth is out of range, or the model has no tokenizer.
    """
    tokenizer, config = model.tokenizer, model.config
    if tokenizer is None:
        raise ConfigError("needle needs a tokenizer: this model was loaded without one")
    question = tokenizer.encode(QUESTION)
    room = 64 + len(question)
    limit = config.context_limit
    for length in lengths:
        if length < room:
            raise ConfigError(
                f"lengths holds {length}, too few for needle and question: give at least {room}"
            )
        if limit is not None and length + 16 > limit:
            raise ConfigError(
                f"lengths holds {length}, but the model's context is {limit} tokens, of which the "
                f"answer takes 16: give at most {limit - 16}"
            )
    for depth in depths:
        if not 0 <= depth <= 100:
            raise ConfigError(f"depths holds {depth}: give percents from 0 to 100")
    if trials < 1:
        raise ConfigError(f"trials={trials}: give at least 1")
    straw = tokenizer.encode(hay)
    if not straw:
        raise ConfigError("the hay is empty: give a text")
    score = jax.jit(_scorer(model.module))
    cells = []
    for length in lengths:
        for depth in depths:
            rng = np.random.default_rng([seed, length, round(depth * 100)])
            won, odds, prompts, keys = [], [], [], []
            for _ in range(trials):
                prompt, key, decoys = _trial(rng, tokenizer, straw, question, length, depth)
                with model.on_mesh():
                    found = np.asarray(score(model.params, *_candidates(prompt, [key, *decoys])))
                won.append(found[0] > found[1:].max())
                odds.append(found[0] - found[1:].max())
                prompts.append(prompt)
                keys.append(tokenizer.decode(key).strip())
            with model.on_mesh():
                made = model.generator.generate(prompts, SamplingParams(max_new_tokens=12))
            wrote = [key in one.text for key, one in zip(keys, made, strict=True)]
            cell = NeedleCell(
                length, float(depth), *(float(np.mean(x)) for x in (won, odds, wrote))
            )
            cells.append(cell)
            if progress is not None:
                progress(cell)
    return cells


def _trial(
    rng: np.random.Generator,
    tokenizer: Any,
    straw: list[int],
    question: list[int],
    length: int,
    depth: float,
) -> tuple[list[int], list[int], list[list[int]]]:
    """A prompt of `length` tokens; the tokens of key and decoys, all equally many."""
    numbers = rng.choice(np.arange(10_000, 100_000), 10 * (NUM_DECOYS + 1), replace=False)
    encoded = [tokenizer.encode(f" {number}") for number in numbers]
    width = len(encoded[0])
    key, *decoys = [ids for ids in encoded if len(ids) == width][: NUM_DECOYS + 1]
    needle = tokenizer.encode("\nThe pass key is") + key + tokenizer.encode(". Remember it.\n")
    wanted = length - len(needle) - len(question)
    start = int(rng.integers(0, len(straw)))
    hay = [straw[(start + i) % len(straw)] for i in range(wanted)]
    at = round(wanted * depth / 100)
    return hay[:at] + needle + hay[at:] + question, key, decoys


def _candidates(prompt: list[int], answers: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.asarray([prompt + answer for answer in answers], np.int32)
    return tokens, np.asarray(answers, np.int32)


def _scorer(module: Any) -> Callable[..., jax.Array]:
    def score(params: Any, tokens: jax.Array, answers: jax.Array) -> jax.Array:
        """Log-probability of each row's answer, float32 `[N]`, nats."""

        def one(row: jax.Array, answer: jax.Array) -> jax.Array:
            hidden = module.apply({"params": params}, row[None, :-1], method="hidden_states")
            last = hidden[:, -answer.shape[0] :]
            logits = module.apply({"params": params}, last, method="unembed")[0]
            chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), answer[:, None], axis=1)
            return chosen.sum()

        # One row at a time: a long prompt fills the memory by itself.
        return jax.lax.map(lambda pair: one(*pair), (tokens, answers))

    return score


def write_needle(cells: list[NeedleCell], path: str | Path) -> None:
    """A heat map of the accuracy as a picture, and the cells as JSON beside it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    path = Path(path)
    records = [cell._asdict() for cell in cells]
    path.with_suffix(".json").write_text(json.dumps(records, indent=2) + "\n", encoding="utf-8")
    lengths = sorted({cell.length for cell in cells})
    depths = sorted({cell.depth for cell in cells})
    grid = np.full((len(depths), len(lengths)), np.nan)
    for cell in cells:
        grid[depths.index(cell.depth), lengths.index(cell.length)] = cell.accuracy
    figure, axis = plt.subplots(figsize=(1.2 + len(lengths), 1.5 + 0.5 * len(depths)))
    image = axis.imshow(grid, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
    axis.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axis.set_yticks(range(len(depths)), [f"{depth:g}" for depth in depths])
    axis.set(xlabel="tokens", ylabel="depth of the needle, %")
    figure.colorbar(image, label=f"key above {NUM_DECOYS} decoys")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
