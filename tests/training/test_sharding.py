"""The mesh: what is refused and with which advice; every axis gives what one device gives."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from jaxlab.errors import MeshError
from jaxlab.models import ModelConfig, Transformer, XLSTMConfig, init_params, module_for
from jaxlab.objectives import language_modeling
from jaxlab.training import MeshConfig, OptimizerConfig, TrainState, make_mesh, make_train_step
from jaxlab.training.optimizers import make_optimizer
from jaxlab.training.sharding import (
    LOGICAL_RULES,
    batch_sharding,
    batch_shards,
    check_mesh,
    logical_rules,
    param_shardings,
    shardings_like_params,
    use_mesh,
)

MODEL = ModelConfig(
    vocab_size=63,  # divides into nothing: must be replicated
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    tie_word_embeddings=True,
)
BATCH, TIME = 8, 16


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({"data": 3}, r"mesh \{data: 3, .*\} does not make 4 devices; .*data: 4.* would"),
        ({"data": -1, "fsdp": 3}, r"does not make 4 devices; .* would"),
        ({"data": -1, "fsdp": -1}, "mesh.data and mesh.fsdp are both -1"),
        ({"tensor": 0}, "mesh.tensor is 0: give a positive number"),
    ],
)
def test_a_mesh_that_is_not_of_these_devices(mesh, message):
    with pytest.raises(MeshError, match=message):
        make_mesh(MeshConfig(**mesh))


def test_a_mesh_has_to_divide_every_size_of_a_ramp():
    shape = {"num_devices": 4, "batch_size": 8, "sequence_length": 16}
    assert check_mesh(MeshConfig(), MODEL, batch_ramp=(4,), **shape)["data"] == 4
    message = r"data\*fsdp = 4 does not divide data.batch_ramp 2. \{data: 2, .* would work"
    with pytest.raises(MeshError, match=message):
        check_mesh(MeshConfig(), MODEL, batch_ramp=(2, 4), **shape)
    message = "data.batch_ramp 2 is not a multiple of training.accumulate 4: use a batch of 4"
    with pytest.raises(MeshError, match=message):
        check_mesh(MeshConfig(), MODEL, batch_ramp=(2,), accumulate=4, **shape)


@pytest.mark.parametrize(
    ("mesh", "model", "batch", "time", "accumulate", "message"),
    [
        ({}, {}, 6, 16, 1, r"data\*fsdp = 4 does not divide data.batch_size 6. .*data: 2, .*would"),
        ({}, {}, 8, 16, 4, r"data\*fsdp = 4 does not divide .*accumulate 4 = 2 rows"),
        ({}, {}, 8, 16, 3, "batch_size 8 is not a multiple of training.accumulate 3: .* of 9"),
        ({"fsdp": 4, "data": 1}, {"hidden_size": 18, "head_dim": 8}, 8, 16, 1, "fsdp = 4 .* 18"),
        (
            {"tensor": 4, "data": 1},
            {"num_heads": 6, "head_dim": 4},
            8,
            16,
            1,
            r"tensor = 4 does not divide model.num_heads 6. \{data: 2, .*tensor: 2, .*would",
        ),
        ({"sequence": 4, "data": 1}, {}, 8, 18, 1, "sequence = 4 .* data.sequence_length 18"),
        (
            {"data": 4},
            {"hidden_size": 15, "num_heads": 3, "num_kv_heads": 3, "head_dim": 4},
            5,
            15,
            1,
            "no mesh of 4 devices would; with data.batch_size 8, {data: 4}",
        ),
    ],
)
def test_a_mesh_that_does_not_divide(mesh, model, batch, time, accumulate, message):
    model = MODEL.replace(**{"num_kv_heads": 2, **model})
    with pytest.raises(MeshError, match=message):
        check_mesh(
            MeshConfig(**mesh),
            model,
            num_devices=4,
            batch_size=batch,
            sequence_length=time,
            accumulate=accumulate,
        )


def test_every_advised_mesh_would_work():
    sizes = {"num_devices": 8, "batch_size": 6, "sequence_length": 48}
    with pytest.raises(MeshError) as error:
        check_mesh(MeshConfig(tensor=8), MODEL, **sizes)
    advised = str(error.value).rpartition("{")[2].partition("}")[0]
    advised = {k: int(v) for k, v in (pair.split(": ") for pair in advised.split(", "))}
    assert check_mesh(MeshConfig(**advised), MODEL, **sizes) == advised


def test_axes_that_may_be_replicated_are():
    mesh = make_mesh(MeshConfig(tensor=4))
    rules = dict(logical_rules(MODEL, mesh))
    assert rules["vocab"] is None
    assert rules["kv_heads"] is None
    assert rules["heads"] == "tensor"
    assert dict(LOGICAL_RULES)["kv_heads"] == "tensor"
    specs = param_shardings(Transformer(MODEL), mesh)
    attention = specs["layers"]["attention"]
    assert attention["q_proj"]["kernel"].spec == PartitionSpec(None, "fsdp", "tensor", None)
    assert attention["k_proj"]["kernel"].spec == PartitionSpec(None, "fsdp", None, None)
    assert specs["embed"]["embedding"].spec == PartitionSpec(None, "fsdp")


def test_optimizer_state_is_split_as_its_parameters_are():
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, tensor=2))
    model = MODEL.replace(hidden_size=256, head_dim=64, intermediate_size=512)
    module = Transformer(model)
    params = jax.eval_shape(lambda key: init_params(module, key), jax.random.key(0))
    shardings = param_shardings(module, mesh)
    for name in ("adamw", "adafactor", "lion", "muon"):
        optimizer = make_optimizer(OptimizerConfig(name=name, schedule="constant"), steps=10)
        state = jax.eval_shape(optimizer.init, params)
        found = shardings_like_params(state, params, shardings, mesh)
        whole = sum(leaf.size for leaf in jax.tree.leaves(state))
        local = sum(
            np.prod(sharding.shard_shape(leaf.shape))
            for sharding, leaf in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True)
        )
        assert local < 0.55 * whole, name


def run(mesh_config, devices, accumulate=1, remat="none", model=MODEL):
    """Loss, gradient norm and parameters after two steps of plain descent."""
    model = model.replace(remat=remat)
    module = module_for(model)
    mesh = make_mesh(mesh_config, devices)
    objective = language_modeling(module, chunk_size=4, z_loss=1e-3, shards=batch_shards(mesh))
    # Plain descent: unlike Adam it does not blow rounding errors up to the size of a step.
    optimizer = optax.sgd(0.5)
    generator = np.random.default_rng(0)
    batches = []
    for _ in range(2):
        tokens = generator.integers(0, 63, (BATCH, TIME + 1), dtype=np.int32)
        segments = np.sort(generator.integers(1, 4, (BATCH, TIME), dtype=np.int32), axis=1)
        batches.append(
            {
                "tokens": tokens[:, :-1],
                "targets": tokens[:, 1:],
                "loss_mask": (generator.random((BATCH, TIME)) < 0.6).astype(np.float32),
                "segment_ids": segments,
            }
        )
    with use_mesh(mesh, logical_rules(model, mesh)):

        def create(key):
            return TrainState.create(init_params(module, key), optimizer, key)

        shapes = jax.eval_shape(create, jax.random.key(0))
        shardings = shardings_like_params(
            shapes, shapes.params, param_shardings(module, mesh), mesh
        )
        state = jax.jit(create, out_shardings=shardings)(jax.random.key(0))
        step = jax.jit(
            make_train_step(objective, optimizer, accumulate=accumulate),
            donate_argnums=0,
            out_shardings=(shardings, None),
        )
        for batch in batches:
            state, metrics = step(state, jax.device_put(batch, batch_sharding(mesh)))
    embedding = state.params["embed"]["embedding"]
    return jax.device_get((metrics, state.params)), embedding


@pytest.fixture(scope="module")
def one_device():
    return run(MeshConfig(), jax.devices()[:1])[0]


@pytest.mark.parametrize(
    ("mesh", "accumulate", "remat"),
    [
        ({"data": 4}, 1, "none"),
        ({"data": 1, "fsdp": 4}, 1, "none"),
        ({"data": 1, "tensor": 4}, 1, "none"),
        ({"data": 1, "sequence": 4}, 1, "none"),
        ({"data": 1, "fsdp": 2, "sequence": 2}, 2, "full"),
    ],
)
def test_a_mesh_equals_one_device(one_device, mesh, accumulate, remat):
    (metrics, params), embedding = run(MeshConfig(**mesh), jax.devices(), accumulate, remat)
    want_metrics, want_params = one_device
    for name, value in want_metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, atol=1e-7, err_msg=name)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), params, want_params)
    if mesh.get("fsdp", 1) > 1:
        assert embedding.addressable_shards[0].data.size < embedding.size


PATTERNS = {
    "full": {},
    "sepllm": {
        "pattern": "sepllm",
        "initial_tokens": 1,
        "window": 3,
        "separators": tuple(range(0, 63, 7)),
    },
    "cca": {"pattern": "cca", "group_size": 2, "window_size": 3},
    "xattention": {
        "pattern": "xattention",
        "block_size": 4,
        "stride": 2,
        "threshold": 0.5,
        "constant_mask": True,
    },
}


# Shifted is the harder case; both are compiled twice, which takes its time.
@pytest.mark.parametrize("shifted", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_on_a_mesh_equals_one_device(pattern, shifted):
    """Heads and sequence split at once, with two key heads for four parts; packed documents."""
    if pattern == "full" and not shifted:
        pytest.skip("above")
    model = MODEL.replace(
        num_layers=1, attention=PATTERNS[pattern], kv_shift={} if shifted else None
    )
    want_metrics, want_params = run(MeshConfig(), jax.devices()[:1], model=model)[0]
    mesh = MeshConfig(data=1, tensor=2, sequence=2)
    (metrics, params), _ = run(mesh, jax.devices(), remat="full", model=model)
    for name, value in want_metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, atol=1e-7, err_msg=name)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), params, want_params)


def test_chunks_do_not_move_rows_between_devices():
    """The loss of a batch split over devices exchanges sums, never hidden states."""
    mesh = make_mesh(MeshConfig(data=2, sequence=2))
    batch, time, width, vocab = 8, 64, 16, 64

    def loss(hidden, embedding, targets):
        from jaxlab.objectives import chunked_cross_entropy

        def unembed(h):
            return jnp.einsum("...d,vd->...v", h, embedding)

        return chunked_cross_entropy(
            hidden, unembed, targets, chunk_size=8, shards=batch_shards(mesh)
        )[0]

    split = batch_sharding(mesh)
    whole = jax.sharding.NamedSharding(mesh, PartitionSpec())
    arguments = (
        jax.ShapeDtypeStruct((batch, time, width), jnp.float32, sharding=split),
        jax.ShapeDtypeStruct((vocab, width), jnp.float32, sharding=whole),
        jax.ShapeDtypeStruct((batch, time), jnp.int32, sharding=split),
    )
    with use_mesh(mesh, LOGICAL_RULES):
        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*arguments).compile()
    text = compiled.as_text()
    for collective in ("all-gather", "all-to-all", "collective-permute"):
        assert f" {collective}(" not in text
    # One sum of the unembedding's gradient and a few scalars, none of them in the loop over chunks.
    assert 1 <= text.count(" all-reduce(") <= 6


@pytest.mark.parametrize(
    "mesh",
    [
        {"tensor": 2, "sequence": 2},
        pytest.param({"fsdp": 2, "sequence": 2}, marks=pytest.mark.slow),
    ],
)
def test_an_xlstm_on_a_mesh_equals_one_device(mesh):
    """Stretches of a row on several devices exchange their memories' summaries."""
    model = XLSTMConfig(
        vocab_size=63,
        embedding_dim=16,
        num_blocks=2,
        num_heads=2,
        igate_bias_init=0.0,  # open, or nothing of the memory would be seen
        # At the usual 1e-6 the norm's gradient blows rounding errors of small outputs up.
        cell_norm_eps=0.1,
        ffn_round_up_to_multiple_of=16,
    )
    want_metrics, want_params = run(MeshConfig(), jax.devices()[:1], model=model)[0]
    (metrics, params), _ = run(MeshConfig(data=1, **mesh), jax.devices(), model=model)
    for name, value in want_metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, atol=1e-7, err_msg=name)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), params, want_params)
