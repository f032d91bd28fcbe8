"""Optimizers and schedules: their values, what decays, what is frozen."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from jaxlab.errors import ConfigError
from jaxlab.models import XLSTM, ModelConfig, Transformer, XLSTMConfig, abstract_params, init_params
from jaxlab.training import OptimizerConfig, make_optimizer, make_schedule
from jaxlab.training.optimizers import _matrix_axes, trainable_mask


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


def test_exponential_goes_on_at_its_pace_and_cools_down_to_zero():
    got = rates(
        16,
        schedule="exponential",
        warmup_steps=2,
        decay_steps=5,
        min_lr_ratio=0.1,
        cooldown_steps=4,
    )
    np.testing.assert_allclose(got[:2], [0.5, 1.0])
    np.testing.assert_allclose(got[2:12], 0.1 ** (np.arange(10) / 5), rtol=1e-6)
    before = 0.1 ** (10 / 5)  # what the 13th update would have had
    np.testing.assert_allclose(got[12:], before * np.array([4, 3, 2, 1, 0]) / 4, atol=1e-8)


def test_exponential_fills_what_warm_up_and_cool_down_leave():
    got = rates(12, schedule="exponential", warmup_steps=3, min_lr_ratio=0.25, cooldown_steps=1)
    np.testing.assert_allclose(got[3:11], 0.25 ** (np.arange(8) / 8), rtol=1e-6)
    np.testing.assert_allclose(got[11:], [0.25, 0.0], rtol=1e-6)


def test_exponential_over_the_steps_of_xlstm_7b():
    schedule = make_schedule(
        OptimizerConfig(
            learning_rate=5e-4,
            schedule="exponential",
            warmup_steps=3000,
            decay_steps=497_000,
            min_lr_ratio=0.1,
            cooldown_steps=7000,
        ),
        550_000,
    )
    expected = {0: 5e-4 / 3000, 3000: 5e-4, 500_000: 5e-5, 550_000: 0.0}
    expected[543_000] = 5e-4 * 0.1 ** (540_000 / 497_000)
    expected[546_500] = expected[543_000] / 2
    for step, rate in expected.items():
        assert float(schedule(step)) == pytest.approx(rate, rel=2e-6, abs=1e-10), step


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_every_schedule_can_cool_down(schedule):
    fields = {"schedule": schedule, "warmup_steps": 2, "min_lr_ratio": 0.5}
    got = rates(12, cooldown_steps=4, **fields)
    np.testing.assert_allclose(got[:8], rates(8, **fields)[:8], rtol=1e-6)
    end = 1.0 if schedule == "constant" else 0.5
    np.testing.assert_allclose(got[8:], end * np.array([4, 3, 2, 1, 0]) / 4, rtol=1e-6)


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_decay_that_ends_early_stays_at_its_floor(schedule):
    got = rates(10, schedule=schedule, decay_steps=4, min_lr_ratio=0.2)
    np.testing.assert_allclose(got[4:], 0.2, rtol=1e-6)
    assert got[3] > 0.2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schedule": "exponential"}, "min_lr_ratio 0 is never reached"),
        ({"schedule": "wsd", "cooldown_steps": 5}, "cooldown_steps 5 does not go with"),
        ({"schedule": "constant", "decay_steps": 5}, "decay_steps 5 has no meaning"),
    ],
)
def test_schedules_that_contradict_themselves(fields, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**fields)


def test_warm_up_and_cool_down_leave_a_step_between_them():
    with pytest.raises(ConfigError, match=r"warmup_steps 4 and optimizer\.cooldown_steps 6 leave"):
        make_schedule(OptimizerConfig(warmup_steps=4, cooldown_steps=6), 10)


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


def test_an_slstm_block_is_as_its_axes_are():
    """Its gates are a matrix a head, its convolution is none."""
    config = XLSTMConfig(
        vocab_size=64, embedding_dim=16, num_blocks=2, num_heads=2, block_pattern="ms"
    )
    params = abstract_params(XLSTM(config))
    axes = _matrix_axes(params)["layers"]["slstm_block"]["slstm"]
    assert axes["igate"]["kernel"] == contrib.MuonDimensionNumbers((2,), (3,))
    assert axes["conv"]["kernel"] is None
    assert axes["gate_bias"] is None
