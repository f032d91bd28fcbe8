"""The train step and the evaluation step: pure functions of state and batch."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from jaxlab.objectives.language_modeling import Objective
from jaxlab.training.optimizers import trainable_mask

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]


class TrainState(struct.PyTreeNode):
    """All that a train step changes, and the key from which it draws.

    Attributes:
      step: updates done, int32 scalar.
      params: the parameters.
      opt_state: the optimizer's state.
      rng: a typed key; step n uses `fold_in(rng, n)`, so a resumed run draws the same numbers.
      ema_params: moving average of the parameters, or None.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    rng: jax.Array
    ema_params: Any = None

    @classmethod
    def create(
        cls,
        params: Any,
        optimizer: optax.GradientTransformation,
        rng: jax.Array,
        *,
        ema: bool = False,
    ) -> "TrainState":
        """The state before the first step. With `ema`, the average begins at `params`."""
        return cls(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=optimizer.init(params),
            rng=rng,
            ema_params=jax.tree.map(jnp.copy, params) if ema else None,
        )


def make_train_step(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    *,
    accumulate: int = 1,
    only: Sequence[str] | None = None,
    ema_decay: float | None = None,
    schedule: optax.Schedule | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """A pure function that does one update; `jax.jit` it, donating the state.

    Args:
      objective: `objective(params, batch, rng) -> (loss, metrics)`, a mean over
        `metrics["weight"]` things.
      optimizer: an optax transformation.
      accumulate: micro-batches of an update. Rows are dealt out to them; gradients are weighted by
        `metrics["weight"]`, so the update is that of the whole batch.
      only: patterns of the parameters that are trained (see `trainable_mask`); others keep their
        values and no gradient is computed for them. Give `make_optimizer` the same.
      ema_decay: decay of `state.ema_params`, if there are any.
      schedule: if given, the metrics tell its value, `learning_rate`.

    Returns:
      step(state, batch) -> (state, metrics). Every array of the batch has the rows as first axis.
      Metrics, float32 scalars: those of the objective, and `grad_norm` before clipping.
    """
    if accumulate < 1:
        raise ValueError(f"accumulate is {accumulate}: give at least one micro-batch per update")

    def gradients_of(params: Any, batch: Batch, rng: jax.Array) -> tuple[Metrics, list[Any]]:
        leaves, treedef = jax.tree.flatten(params)
        trained = jax.tree.leaves(trainable_mask(params, only))

        def loss_of(variables: list[jax.Array], batch: Batch, rng: jax.Array):
            remaining = iter(variables)
            merged = [
                next(remaining) if is_trained else leaf
                for leaf, is_trained in zip(leaves, trained, strict=True)
            ]
            loss, metrics = objective(treedef.unflatten(merged), batch, rng)
            return loss, {"loss": loss, "weight": jnp.ones(()), **metrics}

        differentiate = jax.grad(loss_of, has_aux=True)
        variables = [leaf for leaf, is_trained in zip(leaves, trained, strict=True) if is_trained]
        if accumulate == 1:
            gradients, metrics = differentiate(variables, batch, rng)
        else:
            gradients, metrics = _accumulated(differentiate, variables, batch, rng, accumulate)
        remaining = iter(gradients)
        # The zeros of frozen parameters only keep the tree whole: nothing below reads them.
        filled = [
            next(remaining) if is_trained else jnp.zeros_like(leaf)
            for leaf, is_trained in zip(leaves, trained, strict=True)
        ]
        metrics["grad_norm"] = optax.global_norm(gradients)
        return metrics, treedef.unflatten(filled)

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        rng = jax.random.fold_in(state.rng, state.step)
        metrics, gradients = gradients_of(state.params, batch, rng)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        mask = trainable_mask(params, only)
        # A frozen parameter stays the very array it was, and is not even copied.
        params = jax.tree.map(
            lambda trained, new, old: new if trained else old, mask, params, state.params
        )
        if schedule is not None:
            metrics["learning_rate"] = jnp.asarray(schedule(state.step), jnp.float32)
        ema_params = state.ema_params
        if ema_decay is not None and ema_params is not None:
            ema_params = optax.incremental_update(params, ema_params, 1.0 - ema_decay)
        state = state.replace(
            step=state.step + 1, params=params, opt_state=opt_state, ema_params=ema_params
        )
        return state, metrics

    return step


def make_eval_step(objective: Objective) -> Callable[[Any, Batch], Metrics]:
    """A pure function `evaluate(params, batch) -> metrics` of the objective, without an update.

    To average over batches, weigh each one's metrics by its `weight`.
    """

    def evaluate(params: Any, batch: Batch) -> Metrics:
        loss, metrics = objective(params, batch, jax.random.key(0))
        return {"loss": loss, "weight": jnp.ones(()), **metrics}

    return evaluate


def _accumulated(
    differentiate: Callable[..., tuple[list[jax.Array], Metrics]],
    variables: list[jax.Array],
    batch: Batch,
    rng: jax.Array,
    accumulate: int,
) -> tuple[list[jax.Array], Metrics]:
    """Mean gradients and metrics of micro-batches, weighted; accumulated in float32."""

    def split(x: jax.Array) -> jax.Array:
        if x.shape[0] % accumulate:
            raise ValueError(
                f"a batch of {x.shape[0]} rows does not divide into {accumulate} micro-batches"
            )
        # Row i goes to micro-batch i mod k: each device's rows spread over all micro-batches, so
        # that none has to be sent to another device.
        return jnp.swapaxes(x.reshape(x.shape[0] // accumulate, accumulate, *x.shape[1:]), 0, 1)

    micro_batches = jax.tree.map(split, batch)
    first = jax.tree.map(lambda x: x[0], micro_batches)
    _, metric_shapes = jax.eval_shape(differentiate, variables, first, rng)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), (variables, metric_shapes))

    def one(sums: Any, inputs: tuple[jax.Array, Batch]) -> tuple[Any, None]:
        index, micro_batch = inputs
        gradients, metrics = differentiate(variables, micro_batch, jax.random.fold_in(rng, index))
        weight = metrics["weight"]
        terms = gradients, {**metrics, "weight": jnp.ones(())}
        return jax.tree.map(lambda total, term: total + weight * term, sums, terms), None

    sums, _ = jax.lax.scan(one, zeros, (jnp.arange(accumulate), micro_batches))
    weight = sums[1]["weight"]
    divisor = jnp.where(weight > 0, weight, 1.0)
    gradients, metrics = jax.tree.map(lambda total: total / divisor, sums)
    gradients = [g.astype(v.dtype) for g, v in zip(gradients, variables, strict=True)]
    return gradients, {**metrics, "weight": weight}
