"""Decoding: sampling, batched and streamed generation."""

from jaxlab.inference.generator import Generation, Generator, Timing, generate, stream
from jaxlab.inference.prompt_state import PromptState
from jaxlab.inference.sampling import (
    Processors,
    RowSettings,
    SamplingParams,
    processed_logits,
    processed_probabilities,
    row_settings,
    sample,
)

__all__ = [
    "Generation",
    "Generator",
    "Processors",
    "PromptState",
    "RowSettings",
    "SamplingParams",
    "Timing",
    "generate",
    "processed_logits",
    "processed_probabilities",
    "row_settings",
    "sample",
    "stream",
]
