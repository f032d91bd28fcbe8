"""The train step: accumulation, clipping, frozen parameters, moving averages."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlab.models import ModelConfig, Transformer, init_params
from jaxlab.objectives import language_modeling
from jaxlab.training import (
    OptimizerConfig,
    TrainState,
    make_eval_step,
    make_optimizer,
    make_schedule,
    make_train_step,
)

BATCH, TIME, VOCAB = 8, 16, 32
CONFIG = ModelConfig(
    vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2
)


@pytest.fixture(scope="module")
def objective():
    return language_modeling(Transformer(CONFIG), chunk_size=8)


@pytest.fixture(scope="module")
def params():
    return jax.jit(lambda key: init_params(Transformer(CONFIG), key))(jax.random.key(0))


@pytest.fixture(scope="module")
def batch():
    tokens = np.random.default_rng(0).integers(0, VOCAB, (BATCH, TIME + 1), dtype=np.int32)
    # Rows with many targets and rows with few, so that a plain mean of means would be wrong.
    lengths = np.array([16, 1, 3, 16, 0, 7, 2, 5])
    mask = (np.arange(TIME) < lengths[:, None]).astype(np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "loss_mask": mask}


def sgd():
    # Plain descent: unlike Adam it does not blow rounding errors up to the size of a step.
    return optax.sgd(0.5)


@pytest.mark.parametrize("accumulate", [2, 8])
def test_accumulation_equals_one_big_batch(objective, params, batch, accumulate):
    state = TrainState.create(params, sgd(), jax.random.key(1))
    whole, metrics = jax.jit(make_train_step(objective, sgd()))(state, batch)
    parts, part_metrics = jax.jit(make_train_step(objective, sgd(), accumulate=accumulate))(
        state, batch
    )
    assert set(metrics) == set(part_metrics)
    for name, value in metrics.items():
        np.testing.assert_allclose(part_metrics[name], value, rtol=2e-6, atol=1e-6, err_msg=name)
    assert metrics["weight"] == batch["loss_mask"].sum()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), parts.params, whole.params
    )


def test_a_batch_that_does_not_divide_is_refused(objective, params, batch):
    state = TrainState.create(params, sgd(), jax.random.key(1))
    with pytest.raises(ValueError, match="batch of 8 rows does not divide into 3 micro-batches"):
        make_train_step(objective, sgd(), accumulate=3)(state, batch)


def test_a_batch_without_targets_changes_nothing(objective, params, batch):
    state = TrainState.create(params, sgd(), jax.random.key(1))
    empty = {**batch, "loss_mask": np.zeros((BATCH, TIME), np.float32)}
    for accumulate in (1, 2):
        step = jax.jit(make_train_step(objective, sgd(), accumulate=accumulate))
        after, metrics = step(state, empty)
        assert metrics["loss"] == 0
        jax.tree.map(np.testing.assert_array_equal, after.params, state.params)


def test_the_reported_norm_is_that_before_clipping(objective, params, batch):
    config = OptimizerConfig(schedule="constant", clip_norm=1e-3)
    optimizer = optax.chain(optax.clip_by_global_norm(1e-3), optax.sgd(1.0))
    state = TrainState.create(params, optimizer, jax.random.key(1))
    after, metrics = jax.jit(
        make_train_step(objective, optimizer, schedule=make_schedule(config, 10))
    )(state, batch)
    gradients = jax.jit(jax.grad(lambda p: objective(p, batch, jax.random.key(0))[0]))(params)
    np.testing.assert_allclose(metrics["grad_norm"], optax.global_norm(gradients), rtol=1e-5)
    moved = optax.global_norm(jax.tree.map(lambda a, b: a - b, after.params, params))
    np.testing.assert_allclose(moved, 1e-3, rtol=1e-3)
    np.testing.assert_allclose(metrics["learning_rate"], 3e-4, rtol=1e-6)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_frozen_parameters_stay_and_cost_no_gradient(objective, params, batch, accumulate):
    only = ["layers/attention/o_proj"]
    optimizer = make_optimizer(OptimizerConfig(schedule="constant"), steps=10, only=only)
    state = TrainState.create(params, optimizer, jax.random.key(1))
    step = jax.jit(make_train_step(objective, optimizer, only=only, accumulate=accumulate))
    after, metrics = step(state, batch)

    def kernel(state):
        return state.params["layers"]["attention"]["o_proj"]["kernel"]

    assert np.any(kernel(after) != kernel(state))
    restored = after.params
    restored["layers"]["attention"]["o_proj"]["kernel"] = kernel(state)
    jax.tree.map(np.testing.assert_array_equal, restored, state.params)

    gradients = jax.jit(jax.grad(lambda p: objective(p, batch, jax.random.key(0))[0]))(params)
    norm = optax.global_norm(gradients["layers"]["attention"]["o_proj"])
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)


def test_moving_average(objective, params, batch):
    state = TrainState.create(params, sgd(), jax.random.key(1), ema=True)
    after, _ = jax.jit(make_train_step(objective, sgd(), ema_decay=0.75))(state, batch)
    jax.tree.map(
        lambda ema, old, new: np.testing.assert_allclose(ema, 0.75 * old + 0.25 * new, atol=1e-6),
        after.ema_params,
        state.params,
        after.params,
    )


def test_each_step_draws_its_own_numbers(params):
    def noisy(params, batch, rng):
        loss = jax.random.uniform(rng) + 0.0 * jnp.sum(params["final_norm"]["scale"])
        return loss, {}

    step = make_train_step(noisy, sgd())
    state = TrainState.create(params, sgd(), jax.random.key(1))
    first, metrics = step(state, {})
    _, again = step(state, {})
    _, following = step(first, {})
    assert metrics["loss"] == again["loss"]
    assert metrics["loss"] != following["loss"]


def test_evaluation_is_the_objective(objective, params, batch):
    metrics = jax.jit(make_eval_step(objective))(params, batch)
    loss, _ = jax.jit(objective)(params, batch, jax.random.key(0))
    assert metrics["loss"] == loss
    assert metrics["weight"] == batch["loss_mask"].sum()
