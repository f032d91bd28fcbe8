"""What a model's arithmetic and memory come to, by family of models: analytic, nothing is run."""

from __future__ import annotations

from typing import Any, Protocol

from jaxlab.models import transformer_cost
from jaxlab.models.config import ModelConfig
from jaxlab.models.families import AnyModelConfig
from jaxlab.models.xlstm import cost as xlstm_cost
from jaxlab.models.xlstm.config import XLSTMConfig


class Cost(Protocol):
    """What the module of each family has. A multiplication with an addition is two operations."""

    def matmul_params(self, config: Any) -> int:
        """Parameters that a token is multiplied with: all kernels and the unembedding."""

    def mixing_flops(self, config: Any, queries: int, keys: int) -> float:
        """Operations by which all layers mix the tokens of one row: none of them with parameters.

        `queries` new tokens at the end of `keys` tokens, the queries among them.
        """

    def cache_bytes(self, config: Any, batch_size: int, max_length: int) -> int:
        """Bytes that decoding keeps for `batch_size` rows of up to `max_length` tokens."""

    def decode_bytes(self, config: Any, context: int) -> float:
        """Bytes of a row's cache that a step reads and writes behind `context` tokens."""

    def layer_activations(self, config: Any) -> tuple[float, float]:
        """Numbers in the compute type that a layer writes and reads for a token, forward.

        Those that every device of a tensor axis has whole, and those it divides.
        """

    def sequence_bytes(self, config: Any, tokens: float, rows: float) -> float:
        """Bytes of a layer that one shard of `rows`, of `tokens` in all, sends to the others."""


_COSTS: dict[type, Cost] = {ModelConfig: transformer_cost, XLSTMConfig: xlstm_cost}


def cost_of(config: AnyModelConfig) -> Cost:
    """The counts of the config's family, a module with the functions of `Cost`."""
    return _COSTS[type(config)]
