"""Next-token cross-entropy, whole or in chunks that never hold the logits of a whole batch."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int, Num

Metrics = dict[str, jax.Array]


def cross_entropy(
    logits: Float[Array, "*batch vocab"],
    targets: Int[Array, "*batch"],
    mask: Num[Array, "*batch"] | None = None,
    z_loss: float = 0.0,
) -> tuple[Float[Array, ""], Metrics]:
    """Mean cross-entropy of the targets, in float32 whatever the type of the logits.

    Args:
      logits: unnormalised log-probabilities.
      targets: the right classes. Where the mask is 0 any integer will do.
      mask: weight of each target, 0 or 1 as a rule; None weighs all alike. If every weight is 0 the
        loss and its gradient are 0.
      z_loss: factor of the mean squared log-normaliser, which keeps it near 0 (PaLM,
        arXiv:2204.02311, section 5, uses 1e-4).

    Returns:
      The loss in nats per target, and float32 scalars: `loss`, `cross_entropy` (the loss without
      the z-term), `z_loss` (that term) and `weight` (the sum of the mask, by which a mean over
      micro-batches has to weigh them).
    """
    weights = _weights(targets, mask)
    return _mean(_sums(logits, targets, weights, z_loss), weights, z_loss)


def chunked_cross_entropy(
    hidden: Float[Array, "batch time width"],
    unembed: Callable[[jax.Array], jax.Array],
    targets: Int[Array, "batch time"],
    mask: Num[Array, "batch time"] | None = None,
    *,
    chunk_size: int = 128,
    z_loss: float = 0.0,
    shards: tuple[int, int] = (1, 1),
) -> tuple[Float[Array, ""], Metrics]:
    """`cross_entropy(unembed(hidden), …)` without ever holding `[batch, time, vocab]`.

    The time axis is walked in chunks. Under differentiation each chunk's gradient is taken while
    its logits are there, so that the backward pass only scales what is stored: a quarter less
    arithmetic than rematerialising the logits, for one accumulator as large as the unembedding.

    Args:
      hidden: final hidden states, any float type.
      unembed: maps `[..., width]` to logits `[..., vocab]`, position by position. It may close over
        parameters; they get their gradients.
      targets, mask, z_loss: as in `cross_entropy`.
      chunk_size: positions of each row in a chunk.
      shards: over how many devices the mesh splits (batch, time). Chunks are cut within a shard,
        so that no device needs another's rows, and each shard sums its own gradient of the
        unembedding, so that devices exchange it once and not once per chunk.

    Returns:
      As `cross_entropy`; values and gradients are the same up to the order of summation.
    """
    batch, time, width = hidden.shape
    batch_shards, time_shards = shards
    if chunk_size < 1:
        raise ValueError(f"chunk_size is {chunk_size}: give at least one position per chunk")
    if batch % batch_shards or time % time_shards:
        raise ValueError(
            f"hidden states of shape {hidden.shape} do not divide into {shards} shards: "
            "batch and time must be multiples of them"
        )
    weights = _weights(targets, mask)
    rows, span = batch // batch_shards, time // time_shards
    chunk = min(chunk_size, span)
    num_chunks = -(-span // chunk)

    def split(x: jax.Array) -> jax.Array:
        """[batch, time, …] -> [chunks, batch shards, time shards, positions, …]"""
        tail = x.shape[2:]
        x = x.reshape(batch_shards, rows, time_shards, span, *tail)
        padding = num_chunks * chunk - span
        if padding:  # padded positions have weight 0
            x = jnp.pad(x, [(0, 0)] * 3 + [(0, padding)] + [(0, 0)] * len(tail))
        x = x.reshape(batch_shards, rows, time_shards, num_chunks, chunk, *tail)
        x = jnp.moveaxis(x, (3, 0, 2), (0, 1, 2))
        x = x.reshape(num_chunks, batch_shards, time_shards, rows * chunk, *tail)
        return nn.with_logical_constraint(x, (None, "batch", "length", None) + (None,) * len(tail))

    # Shards are mapped over, so `unembed` sees plain [positions, width].
    example = jax.ShapeDtypeStruct((rows * chunk, width), hidden.dtype)
    pure_unembed, parameters = jax.closure_convert(unembed, example)
    sums = _summed_losses(
        pure_unembed, z_loss, split(hidden), split(targets), split(weights), parameters
    )
    return _mean(sums, weights, z_loss)


def _weights(targets: jax.Array, mask: jax.Array | None) -> jax.Array:
    if mask is None:
        return jnp.ones(targets.shape, jnp.float32)
    return jax.lax.stop_gradient(mask.astype(jnp.float32))


class _Sums(NamedTuple):
    """Weighted sums over targets; only the first one is differentiated."""

    total: jax.Array  # nll + z_loss * square
    nll: jax.Array  # of the negative log-likelihoods
    square: jax.Array  # of the squared log-normalisers


def _mean(sums: _Sums, weights: jax.Array, z_loss: float) -> tuple[jax.Array, Metrics]:
    weight = jnp.sum(weights)
    divisor = jnp.where(weight > 0, weight, 1.0)
    loss = sums.total / divisor
    metrics = {
        "loss": loss,
        "cross_entropy": sums.nll / divisor,
        "z_loss": z_loss * sums.square / divisor,
        "weight": weight,
    }
    return loss, jax.lax.stop_gradient(metrics)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _summed_losses(
    unembed: Callable[..., jax.Array],
    z_loss: float,
    hidden: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    parameters: list[jax.Array],
) -> _Sums:
    """Sums over all targets. Arrays are `[chunks, batch shards, time shards, positions, …]`."""

    def one_shard(hidden: jax.Array, targets: jax.Array, weights: jax.Array) -> _Sums:
        return _sums(unembed(hidden, *parameters), targets, weights, z_loss)

    def one_chunk(sums: _Sums, chunk: tuple[jax.Array, ...]) -> tuple[_Sums, None]:
        return _add(sums, jax.vmap(jax.vmap(one_shard))(*chunk)), None

    zeros = _Sums(*(jnp.zeros((), jnp.float32),) * 3)
    sums, _ = jax.lax.scan(one_chunk, zeros, (hidden, targets, weights))
    return sums


def _summed_losses_fwd(
    unembed: Callable[..., jax.Array],
    z_loss: float,
    hidden: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    parameters: list[jax.Array],
) -> tuple[_Sums, tuple[Any, ...]]:
    def one_shard(hidden, targets, weights):
        logits, pullback = jax.vjp(unembed, hidden, *parameters)
        sums, logits_gradient = _sums_and_gradient(logits, targets, weights, z_loss)
        hidden_gradient, *parameter_gradients = pullback(logits_gradient)
        return sums, hidden_gradient, parameter_gradients

    def one_chunk(carry, chunk):
        sums, accumulated = carry
        shard_sums, hidden_gradient, gradients = jax.vmap(jax.vmap(one_shard))(*chunk)
        sums = _add(sums, shard_sums)
        accumulated = [
            a + g.astype(jnp.float32) for a, g in zip(accumulated, gradients, strict=True)
        ]
        return (sums, accumulated), hidden_gradient

    zeros = _Sums(*(jnp.zeros((), jnp.float32),) * 3)
    shards = hidden.shape[1:3]
    accumulators = [
        nn.with_logical_constraint(
            jnp.zeros((*shards, *p.shape), jnp.float32),
            ("batch", "length") + (jax.sharding.PartitionSpec.UNCONSTRAINED,) * p.ndim,
        )
        for p in parameters
    ]
    (sums, accumulated), hidden_gradient = jax.lax.scan(
        one_chunk, (zeros, accumulators), (hidden, targets, weights)
    )
    gradients = [
        jnp.sum(a, axis=(0, 1)).astype(p.dtype)
        for a, p in zip(accumulated, parameters, strict=True)
    ]
    return sums, (hidden_gradient, gradients, targets, weights)


def _summed_losses_bwd(unembed, z_loss, residuals, cotangents):
    del unembed, z_loss
    hidden_gradient, gradients, _, weights = residuals
    scale = cotangents.total  # the other sums only feed metrics

    def scaled(gradient: jax.Array) -> jax.Array:
        return (gradient * scale).astype(gradient.dtype)

    return scaled(hidden_gradient), None, jnp.zeros_like(weights), [scaled(g) for g in gradients]


_summed_losses.defvjp(_summed_losses_fwd, _summed_losses_bwd)


def _sums(logits: jax.Array, targets: jax.Array, weights: jax.Array, z_loss: float) -> _Sums:
    logits = logits.astype(jnp.float32)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    # A masked sum and not a gather: it fuses with its neighbours, and where the vocabulary is split
    # over devices each looks at its own part instead of fetching the others'.
    nll = log_z - jnp.sum(jnp.where(_is_target(logits, targets), logits, 0.0), axis=-1)
    return _weighted_sums(nll, log_z, weights, z_loss)


def _sums_and_gradient(
    logits: jax.Array, targets: jax.Array, weights: jax.Array, z_loss: float
) -> tuple[_Sums, jax.Array]:
    """`_sums`, and the gradient of the first one in the logits, in their type."""
    values = logits.astype(jnp.float32)
    log_z = jax.nn.logsumexp(values, axis=-1)
    is_target = _is_target(values, targets)
    nll = log_z - jnp.sum(jnp.where(is_target, values, 0.0), axis=-1)
    sums = _weighted_sums(nll, log_z, weights, z_loss)

    # d log_z = softmax; d log_z² = 2 log_z softmax
    softmax = jnp.exp(values - log_z[..., None])
    gradient = softmax * (1.0 + 2.0 * z_loss * log_z)[..., None] - is_target
    gradient = jnp.where(weights[..., None] == 0, 0.0, gradient * weights[..., None])
    return sums, gradient.astype(logits.dtype)


def _is_target(logits: jax.Array, targets: jax.Array) -> jax.Array:
    classes = jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1)
    return classes == targets[..., None]


def _weighted_sums(nll: jax.Array, log_z: jax.Array, weights: jax.Array, z_loss: float) -> _Sums:
    def weighted(losses: jax.Array) -> jax.Array:
        # A weight of 0 must silence an infinite loss too, which a product would turn into NaN.
        return jnp.sum(jnp.where(weights == 0, 0.0, losses * weights))

    nll_sum, square_sum = weighted(nll), weighted(jnp.square(log_z))
    return _Sums(nll_sum + z_loss * square_sum, nll_sum, square_sum)


def _add(sums: _Sums, shard_sums: _Sums) -> _Sums:
    return jax.tree.map(lambda total, terms: total + jnp.sum(terms), sums, shard_sums)
