"""What a model with a state of fixed size remembers of a prompt, kept as a file.

    state = model.generator.read(document)
    state.save("document.state")
    …
    state = PromptState.load("document.state", model.config, model.params)
    model.generator.generate("Question: …", after=state)

An xLSTM reads a long document once; every question about it begins from the file, whose size does
not depend on the document's length.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxlab.checkpoints.safetensors_file import SafetensorsFile, save_tensors
from jaxlab.errors import CheckpointError, ConfigError
from jaxlab.models import AnyModelConfig, XLSTMConfig
from jaxlab.models.xlstm.cache import XLSTMCache, init_xlstm_cache
from jaxlab.models.xlstm.state import States, block_states, cache_of_states

_FORMAT = "jaxlab prompt state 1"


@dataclass(frozen=True)
class PromptState:
    """The states of one row after a prompt but for its last token, and that token.

    The last token is kept apart because reading it is what gives the first new one.

    Attributes:
      config: of the model that read the prompt.
      states: one dict of arrays a block, each with a batch of 1.
      num_tokens: tokens of the prompt, the last one included.
      last_token: its id.
      fingerprint: some of the model's parameters, float32 `[N]`.
    """

    config: XLSTMConfig
    states: States
    num_tokens: int
    last_token: int
    fingerprint: np.ndarray

    @classmethod
    def of_cache(
        cls, config: AnyModelConfig, params: Any, cache: XLSTMCache, last_token: int
    ) -> PromptState:
        """From a cache of one row that has read all of a prompt but `last_token`.

        Raises:
          ConfigError: the model's cache grows with the prompt, so there is no state to keep.
        """
        config = check_has_state(config)
        states = jax.device_get(block_states(config, cache))
        count = int(cache.lengths[0]) + 1
        return cls(config, states, count, int(last_token), _fingerprint(params))

    def cache(self, rows: int, **options: Any) -> XLSTMCache:
        """A cache of so many rows, each after the prompt but for its last token.

        `options`: those of `jaxlab.models.init_cache`.
        """
        states = [
            {name: jnp.repeat(jnp.asarray(array), rows, axis=0) for name, array in state.items()}
            for state in self.states
        ]
        lengths = jnp.full((rows,), self.num_tokens - 1, jnp.int32)
        return cache_of_states(self.config, states, lengths, **options)

    def check_model(self, config: AnyModelConfig, params: Any) -> None:
        """Raise `CheckpointError` if another model than that of `config`, `params` made it."""
        config = check_has_state(config)
        there, here = _identity(self.config), _identity(config)
        differing = [name for name in here if there.get(name) != here[name]]
        if differing:
            name = differing[0]
            raise CheckpointError(
                f"the state was made by another model: {name} is {there.get(name)!r} there and "
                f"{here[name]!r} here. Load that model, or read the prompt again with this one"
            )
        # bfloat16 parameters are recognised as rounded float32 ones.
        ours = _fingerprint(params)
        same = self.fingerprint.shape == ours.shape
        if not (same and np.allclose(self.fingerprint, ours, rtol=1e-2, atol=1e-6)):
            raise CheckpointError(
                "the state was made by a model of the same shape with other parameters: load that "
                "model, or read the prompt again with this one"
            )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the state, atomically, as a safetensors file.

        Raises:
          StorageError: it cannot be written.
        """
        tensors = {
            f"blocks.{index}.{name}": np.asarray(array)
            for index, state in enumerate(self.states)
            for name, array in state.items()
        }
        tensors["fingerprint"] = self.fingerprint
        metadata = {
            "format": _FORMAT,
            "config": self.config.model_dump_json(),
            "num_tokens": str(self.num_tokens),
            "last_token": str(self.last_token),
        }
        save_tensors(path, tensors, metadata)

    @classmethod
    def load(cls, path: str | os.PathLike[str], config: AnyModelConfig, params: Any) -> PromptState:
        """Read a state that the model of `config` and `params` made.

        Raises:
          CheckpointError: the file is missing, damaged, no state, or another model's.
          ConfigError: the model has no state of fixed size.
        """
        check_has_state(config)
        path = Path(path)
        if not path.is_file():
            raise CheckpointError(f"{path} does not exist: make it with `jaxlab state save`")
        file = SafetensorsFile(path)
        try:
            if file.metadata.get("format") != _FORMAT:
                raise ValueError(f"its format is {file.metadata.get('format')!r}")
            made_by = XLSTMConfig.model_validate(json.loads(file.metadata["config"]))
            count, last = (int(file.metadata[key]) for key in ("num_tokens", "last_token"))
            if count < 1 or not 0 <= last < made_by.vocab_size:
                raise ValueError(f"its prompt of {count} tokens ends with token {last}")
            fingerprint = np.array(file.tensor("fingerprint"))
            state = cls(made_by, _arranged(made_by, file), count, last, fingerprint)
        except (KeyError, ValueError) as error:
            raise CheckpointError(
                f"{path} is no prompt state of this version ({error}): make it again with "
                "`jaxlab state save`"
            ) from error
        state.check_model(config, params)
        return state


def check_has_state(config: AnyModelConfig) -> XLSTMConfig:
    """`config`, if its model has a state of fixed size.

    Raises:
      ConfigError: it has none.
    """
    if not isinstance(config, XLSTMConfig):
        raise ConfigError(
            f"a {config.architecture} remembers every token of a prompt, so there is no state of "
            "fixed size to keep: use an xLSTM"
        )
    return config


def _arranged(config: XLSTMConfig, file: SafetensorsFile) -> States:
    """The states of the file, of the shapes that the model has."""
    states = []
    for index, shapes in enumerate(_state_shapes(config)):
        state = {}
        for name, shape in shapes.items():
            array = file.tensor(f"blocks.{index}.{name}")
            if array.shape != shape:
                raise ValueError(f"blocks.{index}.{name} is {array.shape}, expected {shape}")
            state[name] = jnp.asarray(array)
        states.append(state)
    return states


def _state_shapes(config: XLSTMConfig) -> list[dict[str, tuple[int, ...]]]:
    """The shapes of one row's states, a dict a block."""
    states = jax.eval_shape(lambda: block_states(config, init_xlstm_cache(config, 1)))
    return [{name: leaf.shape for name, leaf in state.items()} for state in states]


def _identity(config: XLSTMConfig) -> dict[str, Any]:
    """The fields that say which model it is, not how it is run or stored."""
    run = {"dtype", "param_dtype", "state_dtype", "remat", "chunk_size", "weight_mode"}
    tokens = {"bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings"}
    return config.model_dump(mode="json", exclude=run | tokens)


def _fingerprint(params: Any) -> np.ndarray:
    """The first and the last number of every parameter, float32; layers stacked or not."""
    layers = params["layers"]
    if isinstance(layers, tuple):  # a kind of block is told by the layer it is named after
        parts = [("mlstm_block" if "mlstm" in block else "slstm_block", block) for block in layers]
    else:
        parts = sorted(layers.items())
    first: dict[str, jax.Array] = {}
    last: dict[str, jax.Array] = {}
    for part, tree in [("", {**params, "layers": ()}), *parts]:
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            name = part + jax.tree_util.keystr(path)
            first.setdefault(name, leaf[(0,) * leaf.ndim])
            last[name] = leaf[(-1,) * leaf.ndim]
    numbers = jax.device_get([values[name] for values in (first, last) for name in sorted(first)])
    return np.asarray([float(x) for x in numbers], np.float32)
