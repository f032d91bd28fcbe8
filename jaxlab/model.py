"""A loaded language model: module, parameters, configuration and tokenizer in one hand.

    model = jaxlab.load("smollm2-135m-instruct")
    print(model.generate("What is the capital of France?", max_new_tokens=64)[0])

Everything numerical is a pure function of parameters: `apply`, `extend` and the Linen `module` take
them as an argument, so they go through `jax.jit`, `jax.grad` and `jax.vmap` as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlab import checkpoints
from jaxlab.config import parse_config
from jaxlab.data.tokenizers import Tokenizer, check_vocabulary, load_tokenizer
from jaxlab.errors import PromptError
from jaxlab.models import (
    AnyModelConfig,
    Cache,
    LanguageModule,
    init_cache,
    module_for,
    resolve_attention,
)
from jaxlab.models.attention.separator_watch import SeparatorWatch

if TYPE_CHECKING:
    from jaxlab.inference import Generator

Params = Any
Prompt = str | Sequence[dict[str, str]]


class Model:
    """A language model ready to use: a decoder-only transformer or an xLSTM.

    Attributes:
      module: the Linen module, `module.apply({"params": params}, tokens)`.
      params: its parameters, a tree of `jax.Array`.
      config: the frozen `ModelConfig` or `XLSTMConfig`.
      tokenizer: a `Tokenizer`, or None for a model that came without one.
      mesh: the device mesh that the parameters are split over, or None. `model(tokens)`, `extend`
        and `generate` run on it; inside your own `jax.jit`, enter `model.on_mesh()` around it.
    """

    def __init__(
        self,
        module: LanguageModule,
        params: Params,
        tokenizer: Tokenizer | None = None,
        *,
        mesh: jax.sharding.Mesh | None = None,
    ):
        if tokenizer is not None:
            check_vocabulary(tokenizer, module.config)
        self.module = module
        self.params = params
        self.tokenizer = tokenizer
        self.mesh = mesh
        self._separators = SeparatorWatch(module.config)

    @property
    def config(self) -> AnyModelConfig:
        return self.module.config

    @property
    def num_parameters(self) -> int:
        """Parameters in all, embeddings included."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))

    def apply(
        self,
        params: Params,
        tokens: jax.Array,
        *,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Logits, float32 `[B, T, V]`, of `tokens`, int32 `[B, T]`: pure, and jit-able.

        `positions` and `segment_ids`, int32 `[B, T]`, are those of `Transformer.__call__`.
        """
        return self.module.apply(  # type: ignore[return-value]
            {"params": params}, tokens, positions, segment_ids
        )

    def __call__(self, tokens: Any) -> jax.Array:
        """Logits `[B, T, V]` with the model's own parameters, of `tokens` `[B, T]` or `[T]`.

        Raises:
          PromptError: there are no tokens, or, outside jit, one is not of the vocabulary.
        """
        tokens = self._checked(tokens, rows=None)
        self._separators.look(tokens)
        with self.on_mesh():
            return self._jitted_apply(self.params, tokens)

    def _checked(self, tokens: Any, *, rows: int | None) -> jax.Array:
        """`tokens` as int32 `[B, T]`, B being `rows` unless that is None."""
        array = jnp.asarray(tokens)
        if array.size and not jnp.issubdtype(array.dtype, jnp.integer):
            raise PromptError(
                f"tokens are {array.dtype}, not integers: give token ids, as "
                "model.tokenizer.encode makes them"
            )
        shape = array.shape
        array = jnp.atleast_2d(array.astype(jnp.int32))
        if array.ndim != 2 or not array.size:
            raise PromptError(
                f"tokens have the shape {shape}: give [batch, time] with at least one token"
            )
        if rows is not None and array.shape[0] != rows:
            raise PromptError(
                f"tokens have {array.shape[0]} rows and the cache {rows}: give a row of tokens for "
                "each row of the cache"
            )
        largest = self.config.vocab_size - 1
        _check_within("tokens", array, 0, largest, "encode them with the model's own tokenizer")
        return array

    def init_cache(self, batch_size: int, max_length: int, **options: Any) -> Cache:
        """An empty cache of so many rows and tokens a row; see `jaxlab.models.init_cache`."""
        return init_cache(self.config, batch_size, max_length, **options)

    def extend(
        self, params: Params, cache: Cache, tokens: Any, num_tokens: Any = None
    ) -> tuple[jax.Array, Cache]:
        """Append `tokens`, int32 `[B, T]`, to the cache's rows: `(logits [B, T, V], cache)`.

        Pure: the cache given stays valid, so a speculative block can be tried and thrown away.
        Right-pad rows of different lengths and say in `num_tokens`, int32 `[B]`, how many tokens of
        each are real; the logits of the others mean nothing.

        Raises:
          PromptError: there are no tokens, or their rows are not the cache's; outside jit, one is
            not of the vocabulary, `num_tokens` is not within 0 … T, or a row has no room for them.
        """
        tokens = self._checked(tokens, rows=cache.lengths.shape[0])
        cache.check_room(tokens.shape[1] if num_tokens is None else num_tokens)
        if num_tokens is not None:
            num_tokens = jnp.broadcast_to(jnp.asarray(num_tokens, jnp.int32), tokens.shape[:1])
            _check_within("num_tokens", num_tokens, 0, tokens.shape[1], "tokens a row are given")
        if tokens.shape[1] > 1 and _is_empty(cache):  # the text may have had separators before
            self._separators.look(tokens, num_tokens)
        with self.on_mesh():
            return self._jitted_extend(params, cache, tokens, num_tokens)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int | None = None,
        stop: str | Sequence[str] | None = None,
        seed: int = 0,
        **sampling: Any,
    ) -> list[str]:
        """Continue each prompt; one string a prompt, without the prompt.

        Args:
          prompts: one prompt or a list. A prompt is a string, continued as it stands, or a list of
            chat messages `{"role": …, "content": …}`, put through the tokenizer's chat template.
          max_new_tokens: at most so many tokens.
          temperature: 0 takes the likeliest token each time.
          top_p: sample from the smallest set of tokens with at least this probability.
          top_k: sample from the k likeliest; None from all.
          stop: end before the first of these strings.
          seed: the same seed gives a prompt the same text, whatever else is in the batch.
          **sampling: the further fields of `jaxlab.inference.SamplingParams`.

        Raises:
          PromptError: a prompt is empty or longer than the model's context.
        """
        from jaxlab.inference import SamplingParams

        params = SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            stop=() if stop is None else stop,  # type: ignore[arg-type]  # it makes a tuple
            seed=seed,
            **sampling,
        )
        with self.on_mesh():
            return [generation.text for generation in self.generator.generate(prompts, params)]

    def stream(self, prompt: Prompt, **sampling: Any) -> Iterator[str]:
        """Continue one prompt, yielding its text in pieces as they become certain.

        `sampling`: fields of `jaxlab.inference.SamplingParams`.
        """
        from jaxlab.inference import SamplingParams

        pieces = self.generator.stream(prompt, SamplingParams(**sampling))
        return self._stream_on_mesh(pieces)

    def _stream_on_mesh(self, pieces: Iterator[str]) -> Iterator[str]:
        # The mesh is in force only while a piece is made, not while the caller holds it.
        while True:
            with self.on_mesh():
                piece = next(pieces, None)
            if piece is None:
                return
            yield piece

    def on_mesh(self) -> AbstractContextManager[None]:
        """A context in which traced code runs on the model's mesh; does nothing without one."""
        if self.mesh is None:
            return nullcontext()
        from jaxlab.training.sharding import logical_rules, use_mesh

        return use_mesh(self.mesh, logical_rules(self.config, self.mesh))

    @cached_property
    def generator(self) -> Generator:
        """The engine behind `generate`, with its compiled functions; also streams."""
        from jaxlab.inference import Generator

        return Generator(self.module, self.params, self.tokenizer)

    def save(self, directory: str | Path) -> Path:
        """Write a Hugging Face directory that `transformers` and `jaxlab.load` read; atomic.

        Raises:
          StorageError: the disk is full or not writable. What was there before is untouched.
        """
        checkpoints.save_pretrained(directory, self.params, self.config, self.tokenizer)
        return Path(directory)

    def __repr__(self) -> str:
        config = self.config
        return (
            f"Model({config.architecture}, {self.num_parameters / 1e6:.1f}M parameters, "
            f"{config.num_layers} layers, width {config.hidden_size}, {config.param_dtype})"
        )

    @cached_property
    def _jitted_apply(self) -> Any:
        return jax.jit(self.apply)

    @cached_property
    def _jitted_extend(self) -> Any:
        return jax.jit(partial(_extend, self.module))


def load(source: str | Path, *, mesh: jax.sharding.Mesh | None = None, **overrides: Any) -> Model:
    """Load a model from a name, a directory, a file or the hub.

    Args:
      source: a name of `jaxlab.checkpoints.NAMED_MODELS` such as `"smollm2-135m-instruct"`; a
        Hugging Face directory with safetensors; a `.gguf` file; or a hub id `"organisation/name"`.
      mesh: place each parameter on its shards of this mesh while it is read, by the rules of
        `jaxlab.training.sharding`. Default: the default device.
      **overrides: fields of the model's configuration, for example `dtype="bfloat16"`; a section
        such as `attention` takes a dict.

    Raises:
      CheckpointError: the source is missing, malformed or does not fit its configuration.
      ConfigError: an override is unknown or of the wrong type.
      TokenizerError: the tokenizer has more tokens than the model.
    """
    path = checkpoints.resolve(source)
    config = checkpoints.read_config(path)
    if overrides:
        tree = config.model_dump(mode="json")
        for name, value in overrides.items():
            # A part of a section changes that part; naming a pattern begins a new section.
            known = tree.get(name)
            if isinstance(value, dict) and isinstance(known, dict) and "pattern" not in value:
                value = {**known, **value}
            tree[name] = value
        config = parse_config(type(config), tree, default_origin=f"load({str(source)!r})")
    shardings = None
    if mesh is not None:
        from jaxlab.training.sharding import param_shardings

        shardings = param_shardings(module_for(config), mesh)
    tokenizer = load_tokenizer(path)
    check_vocabulary(tokenizer, config)
    config = resolve_attention(config, tokenizer)
    params = checkpoints.load_params(
        path, config, shardings=shardings, param_dtype=config.param_dtype
    )
    return Model(module_for(config), params, tokenizer, mesh=mesh)


def _is_empty(cache: Cache) -> bool:
    return not isinstance(cache.lengths, jax.core.Tracer) and not np.any(cache.lengths)


def _check_within(name: str, values: jax.Array, low: int, high: int, why: str) -> None:
    """Raise `PromptError` if a value lies outside `low` … `high`; silent under jit."""
    if isinstance(values, jax.core.Tracer):
        return
    host = np.asarray(values)
    outside = host[(host < low) | (host > high)]
    if outside.size:
        raise PromptError(f"{name} holds {outside[0]}, which is not within {low} … {high}: {why}")


def _extend(
    module: LanguageModule,
    params: Params,
    cache: Cache,
    tokens: jax.Array,
    num_tokens: jax.Array | None,
) -> tuple[jax.Array, Cache]:
    return module.apply(  # type: ignore[return-value]
        {"params": params}, tokens, cache=cache, num_tokens=num_tokens
    )
