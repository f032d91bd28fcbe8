"""Tiny Llamas stored as golden values: Hugging Face names to our parameters."""

import numpy as np

from jaxlab.checkpoints.layout import hf_layout
from jaxlab.models import ModelConfig


def llama_params(tensors: dict[str, np.ndarray], config: ModelConfig) -> dict:
    """The parameter tree of `config` from tensors by their Hugging Face names."""
    params: dict = {}
    for entry in hf_layout(config):
        layers = range(config.num_layers) if entry.stacked else (None,)
        parts = [np.array(entry.view(tensors[entry.names[0].format(layer)])) for layer in layers]
        node = params
        for key in entry.path[:-1]:
            node = node.setdefault(key, {})
        node[entry.path[-1]] = np.stack(parts) if entry.stacked else parts[0]
    return params
