"""Next-token prediction as an objective of a decoder."""

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import ArrayLike

from jaxlab.objectives.cross_entropy import Metrics, chunked_cross_entropy


@runtime_checkable
class Objective(Protocol):
    """A pure function that a train step differentiates in its first argument.

    The loss is a mean over `metrics["weight"]` things (targets, pairs, …; 1 if there is no such
    entry). Accumulation over micro-batches weighs losses, gradients and the other metrics by it.
    """

    def __call__(
        self, params, batch: dict[str, ArrayLike], rng: jax.Array
    ) -> tuple[jax.Array, Metrics]: ...


def language_modeling(
    module: nn.Module,
    *,
    z_loss: float = 0.0,
    chunk_size: int = 128,
    shards: tuple[int, int] = (1, 1),
) -> Objective:
    """Cross-entropy of the next token.

    Args:
      module: has the methods `hidden_states(tokens, positions, segment_ids)` and `unembed(hidden)`
        of `jaxlab.models.Transformer`.
      z_loss, chunk_size, shards: see `chunked_cross_entropy`.

    Returns:
      objective(params, batch, rng) -> (loss, metrics). `batch` holds `tokens` and `targets` (int32
      `[batch, time]`) and may hold `loss_mask` (float32), `positions` and `segment_ids` (int32),
      all of that shape. `rng` is not used.
    """

    def objective(params, batch: dict[str, ArrayLike], rng: jax.Array) -> tuple[jax.Array, Metrics]:
        del rng
        batch = {name: jnp.asarray(value) for name, value in batch.items()}
        hidden = module.apply(
            {"params": params},
            batch["tokens"],
            positions=batch.get("positions"),
            segment_ids=batch.get("segment_ids"),
            method="hidden_states",
        )

        def unembed(hidden: jax.Array) -> jax.Array:
            return module.apply({"params": params}, hidden, method="unembed")

        return chunked_cross_entropy(
            hidden,
            unembed,
            batch["targets"],
            batch.get("loss_mask"),
            chunk_size=chunk_size,
            z_loss=z_loss,
            shards=shards,
        )

    return objective
