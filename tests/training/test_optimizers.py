"""Optimizers and schedules: their values, what decays, what is frozen."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxlab.errors import ConfigError
from jaxlab.models import ModelConfig, Transformer, init_params
from jaxlab.training import OptimizerConfig, make_optimizer, make_schedule
from jaxlab.training.optimizers import trainable_mask


@pytest.fixture(scope="module")
def params():
    config = ModelConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_layers=2,
        num_heads=2,
        qkv_bias=True,
    )
    return jax.jit(lambda key: init_params(Transformer(config), key))(jax.random.key(0))


def first_update(optimizer, gradients, params):
    return jax.jit(lambda g, p: optimizer.update(g, optimizer.init(p), p)[0])(gradients, params)


def rates(steps, **fields):
    schedule = make_schedule(OptimizerConfig(learning_rate=1.0, **fields), steps)
    return np.array([float(schedule(step)) for step in range(steps + 1)])


def test_warm_up_rises_by_equal_steps_from_the_first():
    np.testing.assert_allclose(
        rates(10, schedule="constant", warmup_steps=4)[:6], [0.25, 0.5, 0.75, 1, 1, 1]
    )
    np.testing.assert_allclose(rates(3, schedule="constant", warmup_steps=1), 1.0)


def test_cosine():
    got = rates(12, schedule="cosine", warmup_steps=2, min_lr_ratio=0.1)
    progress = np.arange(11) / 10
    np.testing.assert_allclose(got[2:], 0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * progress)), rtol=1e-6)


def test_linear():
    got = rates(10, schedule="linear", min_lr_ratio=0.2)
    np.testing.assert_allclose(got, 1 - 0.8 * np.arange(11) / 10, rtol=1e-6)


def test_wsd_is_flat_and_then_falls():
    got = rates(10, schedule="wsd", warmup_steps=2, decay_fraction=0.4)
    np.testing.assert_allclose(
        got, [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0], rtol=1e-6, atol=1e-7
    )


def test_a_warm_up_longer_than_the_run_is_refused():
    with pytest.raises(ConfigError, match="warmup_steps 10 is not less than"):
        make_schedule(OptimizerConfig(warmup_steps=10), 10)


def test_adamw_equals_its_formula():
    config = OptimizerConfig(
        learning_rate=0.1, schedule="constant", weight_decay=0.5, b1=0.9, b2=0.99, clip_norm=None
    )
    params = {"kernel": jnp.array([2.0]), "bias": jnp.array([2.0])}
    gradients = {"kernel": jnp.array([0.3]), "bias": jnp.array([0.3])}
    optimizer = make_optimizer(config, steps=10)
    updates = first_update(optimizer, gradients, params)
    # The first update of Adam is the gradient's sign; only the kernel decays.
    np.testing.assert_allclose(updates["bias"], -0.1, rtol=1e-5)
    np.testing.assert_allclose(updates["kernel"], -0.1 * (1 + 0.5 * 2.0), rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "learning_rate"),
    # Adafactor's rate is relative to the size of the parameters.
    [("adamw", 1e-2), ("adafactor", 5e-2), ("lion", 1e-2), ("muon", 1e-2)],
)
def test_every_optimizer_descends(params, name, learning_rate):
    optimizer = make_optimizer(
        OptimizerConfig(
            name=name, learning_rate=learning_rate, schedule="constant", weight_decay=0.0
        ),
        steps=100,
    )
    target = jax.tree.map(lambda p: p + 0.1, params)

    @jax.jit
    def step(params, state):
        def distance(params):
            squares = jax.tree.map(lambda p, t: jnp.sum((p - t) ** 2), params, target)
            return sum(jax.tree.leaves(squares))

        value, gradients = jax.value_and_grad(distance)(params)
        updates, state = optimizer.update(gradients, state, params)
        return value, optax.apply_updates(params, updates), state

    moved, state = params, jax.jit(optimizer.init)(params)
    first, moved, state = step(moved, state)
    for _ in range(30):
        last, moved, state = step(moved, state)
    assert last < 0.8 * first


@pytest.mark.parametrize(
    ("name", "decay_embeddings"),
    [("adamw", True), ("adamw", False), ("adafactor", False), ("lion", False), ("muon", False)],
)
def test_only_matrices_decay(params, name, decay_embeddings):
    optimizer = make_optimizer(
        OptimizerConfig(
            name=name,
            learning_rate=0.1,
            schedule="constant",
            weight_decay=0.5,
            decay_embeddings=decay_embeddings,
            clip_norm=None,
        ),
        steps=10,
    )
    ones = jax.tree.map(jnp.ones_like, params)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates = first_update(optimizer, zeros, ones)
    attention = updates["layers"]["attention"]
    np.testing.assert_allclose(attention["q_proj"]["kernel"], -0.05, rtol=1e-5)
    np.testing.assert_allclose(attention["o_proj"]["kernel"], -0.05, rtol=1e-5)
    assert not np.any(attention["q_proj"]["bias"])
    assert not np.any(updates["final_norm"]["scale"])
    assert np.any(updates["embed"]["embedding"]) == decay_embeddings


def test_muon_orthogonalises_each_layer_by_itself(params):
    optimizer = make_optimizer(
        OptimizerConfig(
            name="muon", learning_rate=1.0, schedule="constant", weight_decay=0, clip_norm=None
        ),
        steps=10,
    )
    gradients = jax.tree.map(lambda p: jax.random.normal(jax.random.key(1), p.shape), params)
    updates = first_update(optimizer, gradients, params)
    kernel = updates["layers"]["attention"]["o_proj"]["kernel"]  # [layers, heads, head_dim, width]
    for layer in np.asarray(kernel).reshape(2, 16, 16):
        values = np.linalg.svd(layer / (0.2 * 16**0.5), compute_uv=False)
        assert values.min() > 0.5
        assert values.max() < 1.4


def test_frozen_parameters_have_no_update_and_no_state(params):
    config = OptimizerConfig(schedule="constant")
    everything = make_optimizer(config, steps=10).init(params)
    optimizer = make_optimizer(config, steps=10, only=["layers/attention/*", "final_norm"])
    state = optimizer.init(params)
    trained = params["layers"]["attention"], params["final_norm"]
    count = sum(leaf.size for leaf in jax.tree.leaves(trained))
    assert sum(leaf.size for leaf in jax.tree.leaves(state) if leaf.ndim) == 2 * count
    assert sum(leaf.size for leaf in jax.tree.leaves(everything)) > 3 * count

    updates = first_update(optimizer, jax.tree.map(jnp.ones_like, params), params)
    assert not np.any(updates["embed"]["embedding"])
    assert not np.any(updates["layers"]["mlp"]["up_proj"]["kernel"])
    assert np.all(updates["layers"]["attention"]["k_proj"]["kernel"])


@pytest.mark.parametrize(
    ("only", "trained"),
    [
        (["*"], {"embed", "layers", "final_norm", "lm_head"}),
        (["lm_head"], {"lm_head"}),
        (["*/embedding", "final_norm/scale"], {"embed", "final_norm"}),
    ],
)
def test_patterns(params, only, trained):
    mask = trainable_mask(params, only)
    assert {name for name, part in mask.items() if any(jax.tree.leaves(part))} == trained


def test_a_pattern_without_a_match_names_the_nearest(params):
    with pytest.raises(ConfigError, match=r"'lm_haed' matches no parameter.*'lm_head/kernel'"):
        trainable_mask(params, ["lm_haed"])
