"""Every config loads, and its real train step compiles for a v5e and a v5p slice and fits it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from jaxlab.config import load_config
from jaxlab.errors import MeshError
from jaxlab.models import ModelConfig, transformer_cost
from jaxlab.training import roofline
from jaxlab.training.config import ExperimentConfig
from jaxlab.training.preflight import Plan, PreflightError, Topology, preflight

ROOT = Path(__file__).parent.parent
TOPOLOGIES = {
    "quickstart": ("v5e:2x2", "v5p:2x2x1"),
    "smollm2_finetune": ("v5e:2x2", "v5p:2x2x1"),
    "smollm2_cca": ("v5e:2x2", "v5p:2x2x1"),
    "pythia_160m": ("v5e:4x4", "v5p:2x2x4"),
    "pythia_160m_sepllm": ("v5e:4x4", "v5p:2x2x4"),
    "qwen3_0_6b_pretrain": ("v5e:4x4", "v5p:2x2x4"),
    "gemma2_2b_pretrain": ("v5e:4x8", "v5p:2x4x4"),
    "xlstm_165m": ("v5e:4x4", "v5p:2x2x4"),
    "llama3_8b_pretrain": (),  # below: v5p; v5e, too large
    "xlstm_7b": (),  # below
}
# The longest to compile; their other slice is in every run.
SLOW = {
    ("gemma2_2b_pretrain", "v5p:2x4x4"),
    ("pythia_160m_sepllm", "v5p:2x2x4"),
    ("qwen3_0_6b_pretrain", "v5p:2x2x4"),
    ("xlstm_165m", "v5p:2x2x4"),
}


@pytest.fixture
def quick_compiler() -> Iterator[None]:
    """Less effort on speed: kernels are compiled all the same, memory differs by a percent."""
    jax.config.update("jax_optimization_level", "O0")
    yield
    jax.config.update("jax_optimization_level", "UNKNOWN")


def config(name: str, *overrides: str) -> ExperimentConfig:
    return load_config(ExperimentConfig, ROOT / "configs" / f"{name}.yaml", overrides)


def test_every_config_is_preflighted() -> None:
    assert {path.stem for path in (ROOT / "configs").glob("*.yaml")} == set(TOPOLOGIES)


@pytest.mark.parametrize(
    ("name", "topology"),
    [
        pytest.param(name, chips, marks=[pytest.mark.slow] if (name, chips) in SLOW else [])
        for name, both in TOPOLOGIES.items()
        for chips in both
    ],
)
def test_each_config_fits(name: str, topology: str, quick_compiler: None) -> None:
    experiment = config(name)
    report = preflight(experiment, topology, suggest=False)
    assert report.fits
    memory = report.memory
    assert memory is not None
    assert memory.total == report.total_bytes
    # What a chip stores of parameters is theirs in all, split over the axes that split them.
    width = 4  # float32 in each of the configs
    split = report.mesh["fsdp"] * report.mesh["tensor"]
    assert memory.parameters >= report.num_params * width / split
    assert memory.parameters <= 1.1 * report.num_params * width / split
    if experiment.training.only is None:
        assert memory.optimizer > 0.9 * memory.parameters
    assert memory.temporary > 0
    assert 0 < report.roofline.mfu <= 1


def test_llama3_8b_trains_on_4x4x4_at_its_full_context(quick_compiler: None) -> None:
    experiment = config("llama3_8b_pretrain")
    assert experiment.data.sequence_length >= 4096
    assert Plan.of(experiment).model.num_layers == 32
    report = preflight(experiment, "v5p:4x4x4", suggest=False)
    assert report.fits
    assert report.num_params == pytest.approx(8.03e9, rel=1e-3)
    assert report.roofline.bound == "compute"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "overrides"),
    [("v5p:4x4x4", ()), ("v5e:16x16", ("mesh.fsdp=128", "mesh.tensor=2"))],
)
def test_xlstm_7b_trains_on_8k_tokens(topology, overrides, quick_compiler) -> None:
    experiment = config("xlstm_7b", *overrides)
    assert experiment.data.sequence_length == 8192
    report = preflight(experiment, topology, suggest=False)
    assert report.fits
    assert report.num_params == 6_865_424_896


@pytest.mark.slow
def test_xlstm_7b_decodes_64_texts_on_one_v6e(quick_compiler) -> None:
    overrides = ("data.batch_size=64", "data.batch_ramp=null", "mesh.fsdp=1")
    report = preflight(config("xlstm_7b", *overrides), "v6e:1x1", mode="decode", suggest=False)
    assert report.fits
    assert report.memory is not None
    assert report.memory.cache > 64 * 134_000_000


@pytest.mark.slow
@pytest.mark.parametrize("shift", [(), ("model.kv_shift.window=2",)])
@pytest.mark.parametrize("pattern", ["sepllm", "cca", "xattention"])
def test_each_pattern_trains_8b_on_32k_tokens(pattern, shift, quick_compiler) -> None:
    overrides = [
        f"model.attention.pattern={pattern}",
        "model.max_position_embeddings=32768",
        "model.remat=full",
        "data.sequence_length=32768",
        "data.batch_size=64",
        "training.accumulate=1",
        *shift,
    ]
    if pattern == "xattention":
        overrides.append("model.attention.constant_mask=true")
    report = preflight(config("llama3_8b_pretrain", *overrides), "v5p:4x4x4", suggest=False)
    assert report.fits


def test_too_large_a_config_says_so_and_what_would_fit(capsys, quick_compiler) -> None:
    """What was laid out for chips of 95 GiB keeps too much for those of 16."""
    from jaxlab.cli.main import run

    path = ROOT / "configs/llama3_8b_pretrain.yaml"
    with pytest.raises(SystemExit) as ended:
        run(["preflight", str(path), "--topology", "v5e:8x16", "--json"])
    assert ended.value.code == 1
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["fits"] is False
    assert report["total_bytes"] > report["hbm_bytes"]
    # Found by compiling it: keep only the inputs of layers.
    change = {"overrides": {"model.remat": "full"}, "topology": "v5e:8x16"}
    assert report["nearest_change"] == change
    assert "it does not fit; trying model.remat=full on v5e:8x16" in err


def test_a_decode_step_holds_parameters_and_cache() -> None:
    experiment = config("llama3_8b_pretrain", "data.batch_size=16", "mesh.fsdp=1", "mesh.tensor=-1")
    report = preflight(experiment, "v5e:2x4", "decode")
    assert report.fits
    assert report.memory is not None
    assert report.memory.optimizer == 0
    # bfloat16 keys and values: 2 × 32 layers × 8 heads × 128, over 8 chips
    assert report.memory.cache == pytest.approx(16 * 8192 * 2 * 32 * 8 * 128 * 2 / 8, rel=0.01)
    assert report.memory.parameters == pytest.approx(8.03e9 * 2 / 8, rel=0.02)
    assert report.roofline.bound == "memory"


def test_a_mesh_that_does_not_divide_the_slice_is_named() -> None:
    with pytest.raises(MeshError, match="does not make 4 devices"):
        preflight(config("quickstart", "mesh.data=3"), "v5e:2x2")


def test_without_libtpu_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    original = builtins.__import__

    def without_libtpu(name: str, *arguments, **options):
        if name == "libtpu":
            raise ImportError(name)
        return original(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_libtpu)
    with pytest.raises(PreflightError, match=r"pip install 'jaxlab\[preflight\]'"):
        preflight(config("quickstart"), "v5e:2x2")


def test_the_command_prints_what_was_found(capsys: pytest.CaptureFixture[str]) -> None:
    from jaxlab.cli.main import run

    arguments = ["preflight", str(ROOT / "configs/quickstart.yaml"), "--topology", "v5e:2x2"]
    with pytest.raises(SystemExit) as ended:
        run(arguments)
    out = capsys.readouterr().out
    assert not ended.value.code
    for words in ("parameters", "optimizer", "activations", "fits, ", "bound by", "MFU", "FLOP"):
        assert words in out
    with pytest.raises(SystemExit):
        run([*arguments, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is True
    assert found["total_bytes"] == sum(found["memory"].values())


LLAMA = ModelConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    dtype="bfloat16",
)


def test_flops_of_llama3_8b() -> None:
    # 8.03e9 parameters less the 0.525e9 of the embedding, which multiplies nothing.
    assert transformer_cost.matmul_params(LLAMA) == pytest.approx(7.504e9, rel=1e-3)
    linear = 6 * transformer_cost.matmul_params(LLAMA) * 8192
    attention = roofline.train_flops(LLAMA, 1, 8192) - linear
    # Two products, forward once and backward twice, over half of the square.
    assert attention == pytest.approx(3 * 4 * 32 * 32 * 128 * 8192 * 8193 / 2)


def test_attention_flops_of_windows_and_cached_queries() -> None:
    def pairs(queries: int, keys: int, window: int | None) -> float:
        one = LLAMA.replace(num_layers=1, sliding_window=window)
        return transformer_cost.mixing_flops(one, queries, keys) / (4 * 32 * 128)

    for queries, keys, window in [(5, 5, None), (5, 5, 2), (1, 9, None), (1, 9, 4), (4, 9, 6)]:
        counted = sum(
            1
            for query in range(keys - queries, keys)
            for key in range(query + 1)
            if window is None or key > query - window
        )
        assert pairs(queries, keys, window) == counted


def test_a_roofline_is_the_longest_of_its_times() -> None:
    chip = roofline.CHIPS["v5p"]
    mesh = {"data": 1, "fsdp": 64, "tensor": 1, "sequence": 1}
    work = roofline.Work(chip.peak_flops, chip.peak_flops, 0.0, {"fsdp": 0.0})
    assert roofline.roofline(work, chip, mesh).mfu == pytest.approx(1.0)
    # All three dimensions, both directions: 540 GB/s.
    slow = dataclasses.replace(work, network_bytes={"fsdp": 4 * 540e9})
    found = roofline.roofline(slow, chip, mesh)
    assert (found.bound, found.network) == ("network", pytest.approx(4.0))
    assert found.mfu == pytest.approx(0.25)


def test_doubling_a_topology() -> None:
    assert str(Topology.parse("v5p:4x4x4").doubled()) == "v5p:4x4x8"
    assert str(Topology.parse("v5e:4x4").doubled().doubled()) == "v5e:8x8"
