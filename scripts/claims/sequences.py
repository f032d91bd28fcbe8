"""Toy sequences: induction (arXiv:2411.19574, appendix D) and hop-k (arXiv:2402.09268)."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

NOT_ASKED = -1
FIRST = 11  # the lowest id of a token of an induction row
CHARACTERS = 4
UNDEFINED = CHARACTERS  # the answer where the hops lead out of the row


class Batch(NamedTuple):
    """`tokens` and `answers`, int `[rows, length]`; an answer is -1 where nothing is asked."""

    tokens: np.ndarray
    answers: np.ndarray


def induction_rows(
    rng: np.random.Generator, count: int, *, length: int, vocabulary: int, candidates: int
) -> Batch:
    """Rows of drawn tokens in which a token seen before is followed by what followed it first.

    Each row draws from `candidates` tokens of its own. Asked is what follows each repeat; a row
    without any is drawn again.
    """
    batch = Batch(np.zeros((count, length), int), np.full((count, length), NOT_ASKED))
    for row in range(count):
        while (batch.answers[row] == NOT_ASKED).all():
            batch.tokens[row], batch.answers[row] = _induction_row(
                rng, length, rng.choice(np.arange(FIRST, vocabulary), candidates, replace=False)
            )
    return batch


def _induction_row(
    rng: np.random.Generator, length: int, candidates: np.ndarray
) -> tuple[list[int], np.ndarray]:
    row: list[int] = []
    answers = np.full(length, NOT_ASKED)
    follower: dict[int, int] = {}
    while len(row) < length:
        token = int(rng.choice(candidates))
        if row and token == row[-1]:
            continue
        if row:
            follower.setdefault(row[-1], token)
        seen = token in row
        row.append(token)
        if seen and len(row) < length:
            answers[len(row) - 1] = follower[token]
            row.append(follower[token])
    return row, answers


def first_repeats(batch: Batch) -> Batch:
    """The same rows, asked at the first repeat only: later ones are not always decidable."""
    at = (batch.answers != NOT_ASKED).argmax(1)[:, None]
    here = np.arange(batch.tokens.shape[1]) == at
    return Batch(batch.tokens, np.where(here, batch.answers, NOT_ASKED))


def next_tokens(batch: Batch) -> Batch:
    """The same rows, asked for the next token everywhere."""
    answers = np.full_like(batch.answers, NOT_ASKED)
    answers[:, :-1] = batch.tokens[:, 1:]
    return Batch(batch.tokens, answers)


def chance(batch: Batch) -> float:
    """How often a guess among the distinct tokens up to each question is right."""
    asked = zip(*np.nonzero(batch.answers != NOT_ASKED), strict=True)
    return float(np.mean([1 / len(set(batch.tokens[row, : at + 1])) for row, at in asked]))


def hop_positions(characters: np.ndarray, hops: np.ndarray) -> np.ndarray:
    """Where `hops [rows]` hops lead from each place of `characters [rows, length]`; -1: nowhere.

    A hop leads to the place after the last earlier occurrence of the same character.
    """
    count, length = characters.shape
    rows = np.arange(count)
    last = np.full((count, CHARACTERS), -1)
    hop = np.full((count, length), -1)
    for at in range(length):
        before = last[rows, characters[:, at]]
        hop[:, at] = np.where(before >= 0, before + 1, -1)
        last[rows, characters[:, at]] = at
    position = np.tile(np.arange(length), (count, 1))
    for done in range(hops.max(initial=0)):
        onward = np.where(position >= 0, np.take_along_axis(hop, position, 1), -1)
        position = np.where((done < hops)[:, None], onward, position)
    return position


def hop_answers(characters: np.ndarray, hops: np.ndarray) -> np.ndarray:
    """The character there, or `UNDEFINED`."""
    position = hop_positions(characters, hops)
    found = np.take_along_axis(characters, np.maximum(position, 0), 1)
    return np.where(position >= 0, found, UNDEFINED)


def hop_rows(rng: np.random.Generator, count: int, *, length: int, max_hops: int) -> Batch:
    """Rows whose first token says how many hops (id 5 for none), then characters 0 to 3.

    No two neighbours are equal. Asked is, at each character, the one that the hops lead to.
    """
    hops = rng.integers(0, max_hops + 1, count)
    steps = rng.integers(1, CHARACTERS, (count, length - 1))
    steps[:, 0] = rng.integers(0, CHARACTERS, count)
    characters = steps.cumsum(1) % CHARACTERS
    answers = np.pad(hop_answers(characters, hops), ((0, 0), (1, 0)), constant_values=NOT_ASKED)
    return Batch(np.concatenate([(UNDEFINED + 1 + hops)[:, None], characters], 1), answers)
