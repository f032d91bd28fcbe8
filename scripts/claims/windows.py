"""Loss of SmolLM2 with other attention on fixed windows of real prose."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

import jaxlab
from jaxlab.models import Transformer, resolve_attention
from jaxlab.objectives import cross_entropy

STARTS = (20_000, 60_000, 100_000)


def prose_tokens(model: jaxlab.Model) -> np.ndarray:
    """Token ids of the running Python's language reference, topics in the order of their names."""
    topics = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics))
    return np.asarray(model.tokenizer.encode(text), np.int32)


def windows(tokens: np.ndarray, length: int, starts: Sequence[int] = STARTS) -> np.ndarray:
    """int32 `[len(starts), length]`."""
    return np.stack([tokens[start : start + length] for start in starts])


def with_attention(model: jaxlab.Model, attention: Any) -> Transformer:
    """The model's module with another attention; the parameters stay as they are."""
    config = model.config.replace(attention=attention)
    return Transformer(resolve_attention(config, model.tokenizer))


def mean_losses(module: Transformer, params: Any, tokens: np.ndarray, scored: int) -> list[float]:
    """Nats a token of each window's last `scored` predictions."""
    return [float(_loss(module, scored, params, row)) for row in tokens]


@partial(jax.jit, static_argnums=(0, 1))
def _loss(module: Transformer, scored: int, params: Any, row: jax.Array) -> jax.Array:
    hidden = module.apply({"params": params}, row[None, :-1], method="hidden_states")
    logits = module.apply({"params": params}, hidden[:, -scored:], method="unembed")
    return cross_entropy(logits, row[None, -scored:])[0]
