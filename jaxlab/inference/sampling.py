"""From logits to tokens: processors, the distribution they give, and draws from it.

Everything here is a pure function of arrays. Every parameter has one value per row, so rows of a
batch may differ and nothing recompiles when a value changes; only `Processors`, which says what
kinds of work there are at all, is static, so that greedy decoding pays for nothing else.

The order is that of Hugging Face transformers: repetition penalty, temperature, top-k, top-p,
min-p.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlab.errors import ConfigError

MAX_SEED = 2**32 - 1


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt.

    Args:
      max_new_tokens: at most so many tokens, at least 1.
      temperature: logits are divided by it; 0 takes the likeliest token (the lowest id of a tie)
        and ignores `top_k`, `top_p` and `min_p`.
      top_k: sample from the k likeliest tokens; None or 0 from all.
      top_p: sample from the smallest set of likeliest tokens with at least this probability.
      min_p: drop tokens less likely than `min_p` times the likeliest one.
      repetition_penalty: divides the positive and multiplies the negative logits of tokens that
        occur in the prompt or the text so far (Keskar et al. 2019, arXiv:1909.05858); 1 is none.
      stop: end before the first of these strings.
      seed: 0 … 2**32 - 1. A row's random numbers depend on its seed and the position only.

    Raises:
      ConfigError: a value is out of range.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        for name in ("max_new_tokens", "top_k", "seed"):
            value = getattr(self, name)
            if value is None and name == "top_k":
                continue
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise ConfigError(f"{name}={value!r} is not an integer: give a whole number")
            object.__setattr__(self, name, int(value))
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float | np.number):
                raise ConfigError(f"{name}={value!r} is not a number: give a float")
            object.__setattr__(self, name, float(value))
        self._require("max_new_tokens", self.max_new_tokens >= 1, "at least 1")
        self._require(
            "temperature",
            math.isfinite(self.temperature) and self.temperature >= 0,
            "0 (greedy) or a positive number",
        )
        self._require(
            "top_k", self.top_k is None or self.top_k >= 0, "at least 1, or None to keep all tokens"
        )
        self._require("top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (1 keeps all tokens)")
        self._require("min_p", 0 <= self.min_p <= 1, "between 0 (keeps all tokens) and 1")
        self._require(
            "repetition_penalty",
            math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0,
            "positive (1 is no penalty, above 1 discourages repetition)",
        )
        self._require("seed", 0 <= self.seed <= MAX_SEED, f"between 0 and {MAX_SEED}")
        for text in stop:
            if not isinstance(text, str) or not text:
                raise ConfigError(f"stop contains {text!r}: give strings that are not empty")

    def _require(self, name: str, holds: bool, remedy: str) -> None:
        if not holds:
            raise ConfigError(
                f"{name}={getattr(self, name)!r} is out of range: it must be {remedy}"
            )

    def replace(self, **changes: Any) -> SamplingParams:
        """A validated copy with some fields changed."""
        return SamplingParams(**{f.name: getattr(self, f.name) for f in fields(self)} | changes)


class Processors(NamedTuple):
    """What at least one row of a batch asks for: static, and the cost of a step depends on it.

    Attributes:
      random: some row has a temperature above 0.
      truncated: some row uses top-k, top-p or min-p.
      penalised: some row has a repetition penalty, so presence must be tracked.
    """

    random: bool = False
    truncated: bool = False
    penalised: bool = False


class RowSettings(NamedTuple):
    """The numbers of `SamplingParams`, one per row: arrays `[B]`.

    `temperature`, `top_p`, `min_p`, `repetition_penalty` are float32, `top_k` int32 (0 keeps all),
    `seed` uint32.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition_penalty: jax.Array
    seed: jax.Array


def row_settings(rows: Sequence[SamplingParams]) -> tuple[RowSettings, Processors]:
    """The rows' parameters as arrays, and the processors that they need."""

    def column(name: str, dtype: Any) -> Any:
        return np.asarray([getattr(row, name) or 0 for row in rows], dtype)

    settings = RowSettings(
        temperature=column("temperature", np.float32),
        top_k=column("top_k", np.int32),
        top_p=column("top_p", np.float32),
        min_p=column("min_p", np.float32),
        repetition_penalty=column("repetition_penalty", np.float32),
        seed=column("seed", np.uint32),
    )
    drawn = [row for row in rows if row.temperature > 0]
    processors = Processors(
        random=bool(drawn),
        truncated=any(row.top_k or row.top_p < 1 or row.min_p > 0 for row in drawn),
        penalised=any(row.repetition_penalty != 1 for row in rows),
    )
    return settings, processors


def processed_logits(
    logits: jax.Array,
    settings: RowSettings,
    presence: jax.Array | None = None,
    *,
    processors: Processors,
) -> jax.Array:
    """Logits after all processors, -inf where a token is ruled out.

    Args:
      logits: float32 `[B, V]`.
      settings: arrays `[B]`.
      presence: bool `[B, V]`, tokens that a row already holds; needed if `processors.penalised`.
      processors: what to do at all (static).

    Returns:
      float32 `[B, V]`. A row of temperature 0 is only penalised: its token is the argmax.
    """
    logits = logits.astype(jnp.float32)
    if processors.penalised:
        if presence is None:
            raise ValueError("a repetition penalty needs `presence`, bool [B, V]: see mark_present")
        logits = apply_repetition_penalty(logits, presence, settings.repetition_penalty)
    if not processors.random:
        return logits
    greedy = settings.temperature <= 0
    logits = logits / jnp.where(greedy, 1.0, settings.temperature)[:, None]
    if processors.truncated:
        logits = keep_top_k(logits, jnp.where(greedy, 0, settings.top_k))
        logits = keep_top_p(logits, jnp.where(greedy, 1.0, settings.top_p))
        logits = keep_min_p(logits, jnp.where(greedy, 0.0, settings.min_p))
    return logits


def processed_probabilities(
    logits: jax.Array,
    settings: RowSettings,
    presence: jax.Array | None = None,
    *,
    processors: Processors,
) -> jax.Array:
    """The distribution that `sample` draws from: float32 `[B, V]`, rows sum to 1.

    A row of temperature 0 has probability 1 at its argmax. Arguments as `processed_logits`.
    """
    logits = processed_logits(logits, settings, presence, processors=processors)
    certain = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=jnp.float32)
    if not processors.random:
        return certain
    greedy = settings.temperature <= 0
    return jnp.where(greedy[:, None], certain, jax.nn.softmax(logits, axis=-1))


def sample(
    logits: jax.Array,
    settings: RowSettings,
    positions: jax.Array,
    presence: jax.Array | None = None,
    *,
    processors: Processors,
) -> jax.Array:
    """One token a row.

    Args:
      logits: float32 `[B, V]`.
      settings: arrays `[B]`.
      positions: int32 `[B]`, where in its row the token will stand: a row's draw depends on its
        seed and this, not on the other rows or on how decoding is divided into steps.
      presence: bool `[B, V]`, needed if `processors.penalised`.
      processors: what to do at all (static).

    Returns:
      int32 `[B]`. Rows of temperature 0 take the argmax, the lowest id of a tie.
    """
    logits = processed_logits(logits, settings, presence, processors=processors)
    likeliest = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if not processors.random:
        return likeliest
    weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    drawn = draw(weights, row_uniforms(settings.seed, positions))
    return jnp.where(settings.temperature <= 0, likeliest, drawn)


def row_uniforms(seeds: jax.Array, positions: jax.Array, purpose: int = 0) -> jax.Array:
    """One number in [0, 1) per row, float32 `[B]`, a function of seed, position and purpose alone.

    `purpose` tells apart the draws that one position may need (a draft's token, its acceptance, …).
    """

    def one(seed: jax.Array, position: jax.Array) -> jax.Array:
        # Named, so that a changed jax default does not change anybody's text.
        key = jax.random.key(seed, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, position), purpose))

    return jax.vmap(one)(seeds, positions)


def draw(weights: jax.Array, uniforms: jax.Array) -> jax.Array:
    """Index drawn in proportion to `weights`, by inverting the cumulative sum at `uniforms`.

    The sum goes by blocks of about sqrt(V) first, so that it is cheap and float32 stays accurate.

    Args:
      weights: float32 `[B, V]`, not negative, not all zero.
      uniforms: float32 `[B]` in [0, 1).

    Returns:
      int32 `[B]`; an index of weight zero is never returned.
    """
    size = weights.shape[-1]
    block = 1 << math.ceil(math.log2(size) / 2)
    padded = jnp.pad(weights, ((0, 0), (0, -size % block)))
    blocks = padded.reshape(weights.shape[0], -1, block)
    block_ends = jnp.cumsum(blocks.sum(axis=-1), axis=-1)
    target = uniforms[:, None] * block_ends[:, -1:]
    # The first block whose end lies beyond the target has weight in it.
    chosen = jnp.argmax(block_ends > target, axis=-1)[:, None]
    inside = jnp.take_along_axis(blocks, chosen[..., None], axis=1)[:, 0]
    begin = jnp.where(chosen > 0, jnp.take_along_axis(block_ends, chosen - 1, axis=1), 0.0)
    ends = jnp.cumsum(inside, axis=-1)
    beyond = ends > target - begin
    # The two sums round differently: past the block's end, its last possible index is meant.
    last = block - 1 - jnp.argmax(inside[:, ::-1] > 0, axis=-1)
    index = jnp.where(beyond.any(axis=-1), jnp.argmax(beyond & (inside > 0), axis=-1), last)
    return (chosen[:, 0] * block + index).astype(jnp.int32)


def mark_present(presence: jax.Array, tokens: jax.Array, valid: jax.Array) -> jax.Array:
    """`presence`, bool `[B, V]`, with `tokens` `[B, T]` marked where `valid` `[B, T]` is true."""
    rows = jnp.arange(tokens.shape[0])[:, None]
    columns = jnp.where(valid, tokens, presence.shape[1])  # out of range: dropped
    return presence.at[rows, columns].set(True, mode="drop")


def apply_repetition_penalty(
    logits: jax.Array, presence: jax.Array, penalty: jax.Array
) -> jax.Array:
    """Positive logits of present tokens divided by `penalty` `[B]`, negative ones multiplied."""
    penalty = penalty[:, None]
    penalised = jnp.where(logits < 0, logits * penalty, logits / penalty)
    return jnp.where(presence, penalised, logits)


def keep_top_k(logits: jax.Array, k: jax.Array) -> jax.Array:
    """-inf below each row's k-th largest logit; ties with it stay. `k` int32 `[B]`, 0 for all."""
    size = logits.shape[-1]
    k = jnp.where(k > 0, jnp.minimum(k, size), size)
    order = _ordered_bits(logits)

    def enough(threshold: jax.Array) -> jax.Array:
        return jnp.sum(order >= threshold[:, None], axis=-1) >= k

    lowest = jnp.full(k.shape, jnp.iinfo(jnp.int32).min)
    threshold = _largest(enough, lowest, jnp.full(k.shape, jnp.iinfo(jnp.int32).max), 32)
    return jnp.where(order >= threshold[:, None], logits, -jnp.inf)


def keep_top_p(logits: jax.Array, p: jax.Array) -> jax.Array:
    """-inf outside the smallest set of likeliest tokens whose probability reaches `p` `[B]`.

    The token that crosses `p` stays. Of equally likely tokens at the edge the lower ids stay, as
    many as are needed. The edge is found by bisection, of the probability and then of the id,
    without a sort.
    """
    probabilities = jax.nn.softmax(logits, axis=-1)
    order = _ordered_bits(probabilities)

    def reaches(threshold: jax.Array) -> jax.Array:
        kept = jnp.where(order >= threshold[:, None], probabilities, 0.0)
        return jnp.sum(kept, axis=-1) >= p

    zero = jnp.zeros(p.shape, jnp.int32)
    one = jnp.full(p.shape, np.float32(1.0).view(np.int32))
    threshold = _largest(reaches, zero, one, 31)[:, None]
    above, tied = order > threshold, order == threshold
    surplus = p - jnp.sum(jnp.where(above, probabilities, 0.0), axis=-1)
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)

    def short(count: jax.Array) -> jax.Array:
        """Whether the tied tokens of ids below `count` do not yet reach p."""
        kept = jnp.where(tied & (ids < count[:, None]), probabilities, 0.0)
        return jnp.sum(kept, axis=-1) < surplus

    size = logits.shape[-1]
    last = _largest(short, zero, jnp.full(p.shape, size), size.bit_length() + 1)
    kept = above | (tied & (ids <= last[:, None])) | (p >= 1)[:, None]
    return jnp.where(kept, logits, -jnp.inf)


def keep_min_p(logits: jax.Array, min_p: jax.Array) -> jax.Array:
    """-inf where a token is less likely than `min_p` `[B]` times the row's likeliest."""
    ratio = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    return jnp.where(ratio >= min_p[:, None], logits, -jnp.inf)


def _ordered_bits(x: jax.Array) -> jax.Array:
    """int32 that order as the float32 `x` do."""
    x = jnp.where(x == 0, 0.0, x.astype(jnp.float32))  # -0 has other bits than +0
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ jnp.iinfo(jnp.int32).max, bits)


def _largest(holds: Any, low: jax.Array, high: jax.Array, steps: int) -> jax.Array:
    """The largest int32 in [low, high], elementwise, for which `holds`; it must hold at `low`."""

    def halve(_: Any, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        # The mean rounded up, without overflow.
        middle = (low | high) - ((low ^ high) >> 1)
        good = holds(middle)
        return jnp.where(good, middle, low), jnp.where(good, high, middle - 1)

    return jax.lax.fori_loop(0, steps, halve, (low, high))[0]
