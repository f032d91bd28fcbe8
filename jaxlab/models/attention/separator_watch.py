"""A warning for texts without separators, of which `sepllm` keeps only beginning and window."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import numpy as np

from jaxlab.models.attention_config import SepLLMAttention
from jaxlab.models.config import ModelConfig


class SeparatorWatch:
    """Warns, once, if there is no separator among the tokens that a model is to read.

    Args:
      config: the model's. Where no layer looks for separators, nothing is ever said.
    """

    def __init__(self, config: Any):
        self._separators = _listed(config)

    def look(self, tokens: Any, num_tokens: Any = None) -> None:
        """Warn if `tokens`, ints of any shape, hold no separator; silent under jit.

        Args:
          tokens: what a model is given in one call: rows of texts, or one text.
          num_tokens: int `[B]`, how many of each row of `tokens [B, T]` are real; None: all.
        """
        traced = any(isinstance(x, jax.core.Tracer) for x in (tokens, num_tokens))
        if self._separators is None or traced:
            return
        tokens = np.asarray(tokens)
        if num_tokens is not None:
            tokens = tokens[np.arange(tokens.shape[1]) < np.asarray(num_tokens)[:, None]]
        if not tokens.size or np.isin(tokens, self._separators).any():
            return
        number = len(self._separators)
        self._separators = None
        warnings.warn(
            f"attention.pattern=sepllm found no separator among {tokens.size:,} tokens, so nothing "
            "but the first tokens is kept of what leaves the window: set attention.separators, now "
            f"{number} token ids, to 'separator_only', or to strings or ids that such texts hold; "
            "'none' says that none are wanted",
            stacklevel=3,
        )


def _listed(config: Any) -> np.ndarray | None:
    """The ids of the separators; None if there are none, or not yet (`separator_mask` raises)."""
    if not isinstance(config, ModelConfig):
        return None
    for attention in config.layer_attention:
        if isinstance(attention, SepLLMAttention):
            separators = attention.separators
            if isinstance(separators, tuple) and all(isinstance(i, int) for i in separators):
                return np.asarray(separators)
    return None
