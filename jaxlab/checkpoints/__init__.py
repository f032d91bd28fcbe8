"""Models in and out: Hugging Face directories (safetensors) and GGUF files."""

from jaxlab.checkpoints.hf_config import (
    SUPPORTED_ARCHITECTURES,
    config_from_hf,
    config_to_hf,
)
from jaxlab.checkpoints.loading import load_gguf, load_params, read_config
from jaxlab.checkpoints.saving import save_pretrained
from jaxlab.data.model_source import NAMED_MODELS, resolve

__all__ = [
    "NAMED_MODELS",
    "SUPPORTED_ARCHITECTURES",
    "config_from_hf",
    "config_to_hf",
    "load_gguf",
    "load_params",
    "read_config",
    "resolve",
    "save_pretrained",
]
