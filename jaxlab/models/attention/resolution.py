"""What an attention configuration leaves to a tokenizer or a file, made explicit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from jaxlab.data.separators import separator_ids
from jaxlab.errors import ConfigError, TokenizerError
from jaxlab.models.attention_config import PatternConfig, SepLLMAttention, XAttention
from jaxlab.models.config import ModelConfig
from jaxlab.models.xlstm.config import XLSTMConfig

Config = TypeVar("Config", ModelConfig, XLSTMConfig, ModelConfig | XLSTMConfig)


def resolve_attention(config: Config, tokenizer: Any) -> Config:
    """`config` with separators as token ids and calibrated thresholds as numbers.

    Args:
      config: the model's. Without the patterns `sepllm` and `xattention`, or without attention, it
        comes back as it is.
      tokenizer: decides which ids are separators, by decoding every one of them. None if the ids
        are listed already.

    Raises:
      ConfigError: separators need a tokenizer and there is none; a separator is no single token;
        a calibration file is missing or of another model.
    """
    if isinstance(config, XLSTMConfig):
        return config
    if isinstance(config.attention, tuple):
        attention: Any = tuple(_resolved(one, config, tokenizer) for one in config.attention)
    else:
        attention = _resolved(config.attention, config, tokenizer)
    return config if attention == config.attention else config.replace(attention=attention)


def _resolved(attention: PatternConfig, config: ModelConfig, tokenizer: Any) -> PatternConfig:
    if isinstance(attention, SepLLMAttention):
        return _with_ids(attention, config, tokenizer)
    if isinstance(attention, XAttention) and isinstance(attention.threshold, str):
        return attention.model_copy(update={"threshold": read_thresholds(attention.threshold)})
    return attention


def _with_ids(attention: SepLLMAttention, config: ModelConfig, tokenizer: Any) -> SepLLMAttention:
    separators = attention.separators
    if separators == "none":
        return attention
    if isinstance(separators, tuple) and all(isinstance(i, int) for i in separators):
        return attention
    if tokenizer is None:
        raise ConfigError(
            f"attention.separators {separators!r} needs a tokenizer to find the ids: load the "
            "model with one, or list token ids"
        )
    if isinstance(separators, str):
        ids = separator_ids(tokenizer, rule=separators)
    else:
        found = {i for i in separators if isinstance(i, int)}
        for string in (s for s in separators if isinstance(s, str)):
            try:
                found.update(separator_ids(tokenizer, characters=(string,), rule="exact"))
            except (TokenizerError, ValueError) as error:
                raise ConfigError(
                    f"attention.separators holds {string!r}, which is no single token of this "
                    "tokenizer: leave it out, or list token ids"
                ) from error
        ids = tuple(sorted(found))
    ids = tuple(i for i in ids if i < config.vocab_size)
    if config.pad_token_id in ids and config.pad_token_id not in config.eos_token_ids:
        raise ConfigError(
            f"attention.separators holds the padding token {config.pad_token_id}: padding would "
            "stay visible for ever; leave it out, or set pad_token_id to another token"
        )
    return attention.model_copy(update={"separators": ids})


def read_thresholds(path: str | Path) -> tuple[tuple[float, ...], ...]:
    """The `[layers][heads]` of a calibration file: JSON, `{"threshold": [[…], …], …}`."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"attention.threshold names the file {str(path)!r}, which cannot be read "
            f"({error.strerror}): give a number in [0, 1], or the path of a calibration"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path} is not a calibration (JSON): {error}") from error
    rows = content.get("threshold") if isinstance(content, dict) else None
    if not isinstance(rows, list) or not all(
        isinstance(row, list) and all(isinstance(x, int | float) for x in row) for row in rows
    ):
        raise ConfigError(f'{path} has no "threshold" of the form [layers][heads]')
    return tuple(tuple(float(x) for x in row) for row in rows)
