"""Continue prompts: batched or streamed, with as few compiled shapes as possible.

    generator = Generator(module, params, tokenizer)
    [generation] = generator.generate("Once upon a time", SamplingParams(max_new_tokens=32))

A prompt is read in blocks (`prefill`), then tokens are made one at a time, several per device call
(`decode`). Rows of different lengths share a batch: each is right-padded, and says how many of its
tokens are real.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxlab.data.tokenizers import Tokenizer
from jaxlab.errors import PromptError
from jaxlab.inference.buckets import batch_bucket, cache_bucket, prefill_blocks
from jaxlab.inference.prompt_state import PromptState, check_has_state
from jaxlab.inference.sampling import (
    Processors,
    RowSettings,
    SamplingParams,
    mark_present,
    row_settings,
    sample,
)
from jaxlab.inference.stopping import FinishReason, RowText
from jaxlab.models import Cache, LanguageModule, init_cache, unstack_layers
from jaxlab.models.attention.separator_watch import SeparatorWatch

Params = Any
Prompt = str | Sequence[dict[str, str]] | Sequence[int]

PREFILL_BLOCK = 512
DECODE_BLOCK = 32  # tokens per device call; the size of its output buffer
WATCHED_BLOCK = 8  # when stop strings are looked for between calls
STREAM_BLOCK = 4
BATCH_SIZE = 32


@dataclass(frozen=True)
class Timing:
    """Seconds a batch took, compilation included the first time, and how many tokens it moved."""

    prompt_tokens: int
    new_tokens: int
    prefill_seconds: float
    decode_seconds: float

    @property
    def prefill_tokens_per_second(self) -> float:
        return self.prompt_tokens / self.prefill_seconds

    @property
    def decode_tokens_per_second(self) -> float:
        """Of all rows together. The first token of each row belongs to the prefill."""
        return self.new_tokens / self.decode_seconds if self.decode_seconds else 0.0


@dataclass(frozen=True)
class Generation:
    """What one prompt was continued with.

    Attributes:
      text: the new text, without special tokens, cut before a stop string; "" without a tokenizer.
      token_ids: the new tokens, an end-of-sequence token included.
      finish_reason: "stop" at an end-of-sequence token or a stop string, "length" at
        `max_new_tokens` or the end of the context.
      prompt_length: tokens of the prompt.
      timing: of the batch that the prompt was in.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    prompt_length: int
    timing: Timing = field(repr=False, compare=False)


class _Rows(NamedTuple):
    """A batch between two decoding calls.

    `token` int32 `[B]` is sampled but not yet in the cache; `remaining` int32 `[B]` counts the
    tokens that a row may still get, 0 once it is finished; `presence` is bool `[B, V]` or None.
    """

    cache: Cache
    token: jax.Array
    remaining: jax.Array
    presence: jax.Array | None


class Generator:
    """A model with its compiled prefill and decoding functions: keep it, nothing compiles twice.

    Args:
      module: the transformer or xLSTM.
      params: its parameters, stacked or unstacked.
      tokenizer: None to work with token ids only.
      unstack: run the layers unrolled (see `unstack_layers`): decodes faster on CPU, compiles
        slower, and holds a second copy of the layers. Default: on a single CPU device only.
      prefill_block: tokens of each row read at a time, which bounds the memory of a long prompt.
    """

    def __init__(
        self,
        module: LanguageModule,
        params: Params,
        tokenizer: Tokenizer | None = None,
        *,
        unstack: bool | None = None,
        prefill_block: int = PREFILL_BLOCK,
    ):
        if prefill_block < 1:
            raise ValueError(f"prefill_block={prefill_block}: it must be at least 1 token")
        self.module = module
        self.tokenizer = tokenizer
        self.prefill_block = prefill_block
        self._separators = SeparatorWatch(module.config)
        already = isinstance(params["layers"], tuple)
        self.unstacked = already or (_on_one_cpu(params) if unstack is None else unstack)
        self.params = unstack_layers(params, module.config) if self.unstacked else params
        self.eos_token_ids = module.config.eos_token_ids
        if not self.eos_token_ids and tokenizer is not None and tokenizer.eos_token_id is not None:
            self.eos_token_ids = (tokenizer.eos_token_id,)
        self._prefill = jax.jit(partial(_prefill, module), donate_argnames="cache")
        self._first = jax.jit(
            partial(_first_token, module, self.eos_token_ids), static_argnames="processors"
        )
        self._decode = jax.jit(
            partial(_decode, module, self.eos_token_ids),
            static_argnames="processors",
            donate_argnames="rows",
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(),  # noqa: B008
        *,
        batch_size: int = BATCH_SIZE,
        after: PromptState | None = None,
    ) -> list[Generation]:
        """Continue each prompt.

        Args:
          prompts: one prompt or a list of them. A prompt is a string (the tokenizer adds special
            tokens such as a leading BOS), a list of chat messages, or a list of token ids.
          sampling: for all prompts, or one for each.
          batch_size: prompts run together; more are run in turn, those of like length together.
          after: each prompt goes on where this state (of `read`) is, without reading its prompt
            again; a string then gets no special tokens in front, and may be empty.

        Returns:
          One `Generation` a prompt, in order. `max_new_tokens` is cut to what the context has left.

        Raises:
          PromptError: a prompt is empty, holds unknown ids, or leaves no room in the context.
        """
        ids = [self.encode(prompt, after) for prompt in as_prompt_list(prompts)]
        each = [sampling] * len(ids) if isinstance(sampling, SamplingParams) else list(sampling)
        if len(each) != len(ids):
            raise PromptError(
                f"{len(each)} sampling parameters for {len(ids)} prompts: give one, or one a prompt"
            )
        if batch_size < 1:
            raise PromptError(f"batch_size={batch_size}: it must be at least 1")
        order = sorted(range(len(ids)), key=lambda i: (len(ids[i]), i))
        results: dict[int, Generation] = {}
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            rows = self._run([ids[i] for i in batch], [each[i] for i in batch], DECODE_BLOCK, after)
            *_, (texts, timing) = rows
            for i, text in zip(batch, texts, strict=True):
                assert text.finish_reason is not None
                results[i] = Generation(
                    text.text, text.token_ids, text.finish_reason, len(ids[i]), timing
                )
        return [results[i] for i in range(len(ids))]

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008
        *,
        after: PromptState | None = None,
    ) -> Iterator[str]:
        """Continue one prompt, yielding text as it becomes certain.

        The pieces, joined, are the `text` that `generate` returns. None splits a character, none
        holds the beginning of a stop string.
        """
        if self.tokenizer is None:
            raise PromptError("streaming text needs a tokenizer: this model was made without one")
        # Here, so that errors come at the call, not at the first piece.
        ids = self.encode(prompt, after)
        return self._pieces(ids, sampling, after)

    def read(self, prompt: Prompt) -> PromptState:
        """Read a prompt and keep what the model remembers of it; see `PromptState`.

        Raises:
          PromptError: as `encode`.
          ConfigError: the model has no state of fixed size.
        """
        check_has_state(self.module.config)
        ids = self.encode(prompt)
        cache = init_cache(self.module.config, 1, 1, unstacked=self.unstacked)
        if len(ids) > 1:
            cache, _ = self._read_blocks([ids[:-1]], np.asarray([len(ids) - 1], np.int32), cache)
        return PromptState.of_cache(self.module.config, self.params, cache, ids[-1])

    def _pieces(
        self, ids: list[int], sampling: SamplingParams, after: PromptState | None
    ) -> Iterator[str]:
        seen = 0
        for (row,), _ in self._run([ids], [sampling], STREAM_BLOCK, after):
            if len(row.text) > seen:
                yield row.text[seen:]
                seen = len(row.text)

    def encode(self, prompt: Prompt, after: PromptState | None = None) -> list[int]:
        """Token ids of a prompt that can be run, by itself or after a state's.

        Raises:
          PromptError: it is empty, holds unknown ids, or leaves no room in the context.
        """
        config = self.module.config
        if after is not None:
            after.check_model(config, self.params)
            ids = [after.last_token, *self._tokenize(prompt, continues=True)]
        else:
            ids = self._tokenize(prompt)
        if not ids and self.tokenizer is not None and self.tokenizer.bos_token_id is not None:
            ids = [self.tokenizer.bos_token_id]
        if not ids:
            raise PromptError(
                "the prompt is empty and the model has no BOS token to begin a text with: "
                "give at least one token"
            )
        outside = next((i for i in ids if not 0 <= i < config.vocab_size), None)
        if outside is not None:
            raise PromptError(
                f"the prompt holds token id {outside}, but the vocabulary is 0 … "
                f"{config.vocab_size - 1}: encode it with the model's own tokenizer"
            )
        context = config.context_limit
        if context is not None and len(ids) >= context:
            raise PromptError(
                f"the prompt has {len(ids)} tokens and the model's context is {context}, which "
                f"leaves no room for new ones: shorten it to at most {context - 1} tokens"
            )
        return ids

    def _tokenize(self, prompt: Prompt, *, continues: bool = False) -> list[int]:
        if not isinstance(prompt, str) and not any(isinstance(part, dict) for part in prompt):
            if not all(isinstance(token, int | np.integer) for token in prompt):
                raise PromptError(
                    f"{prompt!r:.60} is not one prompt: give a string, a list of chat messages "
                    '{"role": …, "content": …}, or a list of token ids'
                )
            ids = [int(token) for token in prompt]  # type: ignore[arg-type]
            if ids and not continues:
                self._warn_without_bos(ids)
            return ids
        if self.tokenizer is None:
            raise PromptError("a text prompt needs a tokenizer: give token ids instead")
        if not isinstance(prompt, str):
            ids = list(self.tokenizer.apply_chat_template(prompt))  # type: ignore[arg-type]
        else:
            ids = list(self.tokenizer.encode(prompt, add_special_tokens=not continues))
        bos = self.module.config.required_bos
        if bos is not None and not continues and ids[:1] != [bos]:
            ids = [bos, *ids]
        return ids

    def _warn_without_bos(self, ids: list[int]) -> None:
        bos = self.module.config.required_bos
        if bos is not None and ids[0] != bos:
            warnings.warn(
                f"the prompt begins with token {ids[0]}, and the model was trained on texts that "
                f"all begin with {bos} (bos_token_id): put it in front, or answers get worse",
                stacklevel=4,
            )

    def _run(
        self,
        prompts: list[list[int]],
        sampling: list[SamplingParams],
        block: int,
        after: PromptState | None = None,
    ) -> Iterator[tuple[list[RowText], Timing]]:
        """Run one batch; yields its rows' state after every device call."""
        self._separators.look(np.concatenate(prompts))
        context = self.module.config.context_limit
        texts, budgets = [], []
        for ids, params in zip(prompts, sampling, strict=True):
            room = params.max_new_tokens if context is None else context - len(ids)
            budgets.append(min(params.max_new_tokens, room))
            if params.stop and self.tokenizer is None:
                raise PromptError("stop strings need a tokenizer: leave out stop, or give one")
            text = RowText(self.tokenizer, self.eos_token_ids, params.stop, budgets[-1])
            texts.append(text)
        if any(params.stop for params in sampling):
            block = min(block, WATCHED_BLOCK)

        began = time.perf_counter()
        # Rows beyond the prompts make up the bucket; they are finished from the start.
        padding = batch_bucket(len(prompts)) - len(prompts)
        settings, processors = row_settings([*sampling, *[SamplingParams()] * padding])
        rows = self._read(
            [*prompts, *[[0]] * padding],
            np.asarray([*budgets, *[0] * padding], np.int32),
            settings,
            processors,
            after,
        )
        first = np.asarray(rows.token)
        for row, text in enumerate(texts):
            text.push(int(first[row]))
        prefilled = time.perf_counter()
        prompt_tokens = sum(len(ids) for ids in prompts)

        def timing() -> Timing:
            made = sum(len(text.token_ids) - 1 for text in texts)
            now = time.perf_counter()
            return Timing(prompt_tokens, made, prefilled - began, now - prefilled)

        yield texts, timing()
        while any(text.finish_reason is None for text in texts):
            open_rows = np.zeros(len(prompts) + padding, bool)
            open_rows[: len(texts)] = [text.finish_reason is None for text in texts]
            rows, tokens, counts = self._decode(
                self.params, settings, np.int32(block), open_rows, rows=rows, processors=processors
            )
            tokens, counts = np.asarray(tokens), np.asarray(counts)
            for row, text in enumerate(texts):
                for token in tokens[row, : counts[row]]:
                    text.push(int(token))
            yield texts, timing()

    def _read(
        self,
        prompts: list[list[int]],
        budgets: np.ndarray,
        settings: RowSettings,
        processors: Processors,
        after: PromptState | None = None,
    ) -> _Rows:
        """Fill a new cache with the prompts, and sample each row's first token."""
        config = self.module.config
        lengths = np.asarray([len(ids) for ids in prompts], np.int32)
        if after is None:
            width = sum(prefill_blocks(int(lengths.max()), self.prefill_block))
            slots = cache_bucket(max(width, int((lengths + budgets).max())))
            cache = init_cache(config, len(prompts), slots, unstacked=self.unstacked)
        else:
            cache = after.cache(len(prompts), unstacked=self.unstacked)
            lengths = lengths + after.num_tokens - 1
        cache, last = self._read_blocks(prompts, lengths, cache)
        presence = None
        if processors.penalised:
            presence = np.zeros((len(prompts), config.vocab_size), bool)
            for row, ids in enumerate(prompts):
                presence[row, ids] = True
        return self._first(
            self.params, cache, lengths, last, budgets, settings, presence, processors=processors
        )

    def _read_blocks(
        self, prompts: list[list[int]], lengths: np.ndarray, cache: Cache
    ) -> tuple[Cache, jax.Array]:
        """Append the prompts, block by block, to rows that then hold `lengths [B]` tokens.

        Returns the cache, and the hidden state of each row's last token.
        """
        config = self.module.config
        blocks = prefill_blocks(max(map(len, prompts)), self.prefill_block)
        tokens = np.zeros((len(prompts), sum(blocks)), np.int32)
        for row, ids in enumerate(prompts):
            tokens[row, : len(ids)] = ids
        last: Any = np.zeros((len(prompts), config.hidden_size), config.dtype)
        start = 0
        for width in blocks:
            last, cache = self._prefill(
                self.params, tokens[:, start : start + width], lengths, last, cache=cache
            )
            start += width
        return cache, last


def generate(
    module: LanguageModule,
    params: Params,
    tokenizer: Tokenizer | None,
    prompts: Prompt | Sequence[Prompt],
    sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(),  # noqa: B008
) -> list[Generation]:
    """`Generator.generate` once; keep a `Generator` to call it again without compiling again."""
    return Generator(module, params, tokenizer).generate(prompts, sampling)


def stream(
    module: LanguageModule,
    params: Params,
    tokenizer: Tokenizer,
    prompt: Prompt,
    sampling: SamplingParams = SamplingParams(),  # noqa: B008
) -> Iterator[str]:
    """`Generator.stream` once; keep a `Generator` to call it again without compiling again."""
    return Generator(module, params, tokenizer).stream(prompt, sampling)


def as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt (string, chat messages or ids) as a list of one; a list of prompts as it is."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, bytes | dict) or not isinstance(prompts, Iterable):
        raise PromptError(
            f"prompts is {prompts!r:.60}, a {type(prompts).__name__}: give a string, a list of "
            'chat messages {"role": …, "content": …}, or a list of these'
        )
    prompts = list(prompts)  # type: ignore[assignment]
    if prompts and isinstance(prompts[0], dict | int | np.integer):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def _on_one_cpu(params: Params) -> bool:
    leaf = jax.tree.leaves(params)[0]
    devices = leaf.devices() if isinstance(leaf, jax.Array) else {jax.devices()[0]}
    return len(devices) == 1 and next(iter(devices)).platform == "cpu"


def _extend(
    module: LanguageModule,
    params: Params,
    cache: Cache,
    tokens: jax.Array,
    num_tokens: jax.Array,
    positions: jax.Array | None = None,
) -> tuple[jax.Array, Cache]:
    return module.apply(  # type: ignore[return-value]
        {"params": params},
        tokens,
        positions,
        cache=cache,
        num_tokens=num_tokens,
        method="hidden_states",
    )


def _unembed(module: LanguageModule, params: Params, hidden: jax.Array) -> jax.Array:
    return module.apply({"params": params}, hidden, method="unembed")  # type: ignore[return-value]


def _prefill(
    module: LanguageModule,
    params: Params,
    tokens: jax.Array,
    lengths: jax.Array,
    last: jax.Array,
    *,
    cache: Cache,
) -> tuple[jax.Array, Cache]:
    """Append a block of the prompts; `last` `[B, D]` takes the hidden state of a row's end."""
    start = cache.lengths
    index = start[:, None] + jnp.arange(tokens.shape[1])
    # Padding must not look like a longer text to what depends on length (dynamic rotary scaling).
    positions = jnp.minimum(index, lengths[:, None] - 1)
    num_tokens = jnp.clip(lengths - start, 0, tokens.shape[1])
    hidden, cache = _extend(module, params, cache, tokens, num_tokens, positions)
    here = lengths - 1 - start
    at = jnp.clip(here, 0, tokens.shape[1] - 1)[:, None, None]
    candidate = jnp.take_along_axis(hidden, at, axis=1)[:, 0]
    ends_here = (here >= 0) & (here < tokens.shape[1])
    return jnp.where(ends_here[:, None], candidate, last), cache


def _first_token(
    module: LanguageModule,
    eos_token_ids: tuple[int, ...],
    params: Params,
    cache: Cache,
    lengths: jax.Array,
    last: jax.Array,
    budgets: jax.Array,
    settings: RowSettings,
    presence: jax.Array | None,
    *,
    processors: Processors,
) -> _Rows:
    """End the prefill: the prompts are permanent; sample from each one's last token."""
    cache = cache.commit(lengths)
    logits = _unembed(module, params, last)
    token = sample(logits, settings, lengths, presence, processors=processors)
    return _count(eos_token_ids, _Rows(cache, token, budgets, presence), budgets > 0)


def _decode(
    module: LanguageModule,
    eos_token_ids: tuple[int, ...],
    params: Params,
    settings: RowSettings,
    limit: jax.Array,
    open_rows: jax.Array,
    *,
    rows: _Rows,
    processors: Processors,
) -> tuple[_Rows, jax.Array, jax.Array]:
    """Up to `limit` more tokens for each row that is open.

    Returns:
      The rows, new tokens int32 `[B, DECODE_BLOCK]`, and how many of those count, int32 `[B]`.
    """
    rows = rows._replace(remaining=jnp.where(open_rows, rows.remaining, 0))

    def unfinished(state: tuple[jax.Array, _Rows, jax.Array, jax.Array]) -> jax.Array:
        step, rows, _, _ = state
        return (step < limit) & jnp.any(rows.remaining > 0)

    def one_token(
        state: tuple[jax.Array, _Rows, jax.Array, jax.Array],
    ) -> tuple[jax.Array, _Rows, jax.Array, jax.Array]:
        step, rows, tokens, counts = state
        active = rows.remaining > 0
        # A finished row stays as it is, or it would run out of its slots.
        num_tokens = active.astype(jnp.int32)
        hidden, cache = _extend(module, params, rows.cache, rows.token[:, None], num_tokens)
        logits = _unembed(module, params, hidden[:, 0])
        token = sample(logits, settings, cache.lengths, rows.presence, processors=processors)
        token = jnp.where(active, token, rows.token)
        rows = _count(eos_token_ids, rows._replace(cache=cache, token=token), active)
        tokens = jax.lax.dynamic_update_slice(tokens, token[:, None], (0, step))
        return step + 1, rows, tokens, counts + active

    batch = rows.token.shape[0]
    tokens = jnp.zeros((batch, DECODE_BLOCK), jnp.int32)
    state = (jnp.int32(0), rows, tokens, jnp.zeros((batch,), jnp.int32))
    _, rows, tokens, counts = jax.lax.while_loop(unfinished, one_token, state)
    return rows, tokens, counts


def _count(eos_token_ids: tuple[int, ...], rows: _Rows, active: jax.Array) -> _Rows:
    """Book the token just sampled: one fewer remains, none after an end-of-sequence token."""
    remaining = jnp.where(active, rows.remaining - 1, 0)
    if eos_token_ids:
        ended = jnp.isin(rows.token, jnp.asarray(eos_token_ids, jnp.int32))
        remaining = jnp.where(ended, 0, remaining)
    presence = rows.presence
    if presence is not None:
        presence = mark_present(presence, rows.token[:, None], active[:, None])
    return rows._replace(remaining=remaining, presence=presence)
