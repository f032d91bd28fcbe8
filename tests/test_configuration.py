"""Configuration files and overrides: what they accept, and what their errors say."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pydantic
import pytest

from jaxlab.config import load_config
from jaxlab.errors import ConfigError


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)


class Scaling(_Strict):
    type: Literal["linear", "yarn"] = "linear"
    factor: float = 1.0


class Network(_Strict):
    vocab_size: int = 3
    eos: int | tuple[int, ...] | None = None
    scaling: Scaling | None = None
    layer_types: tuple[str, ...] | None = None


class Experiment(_Strict):
    name: str
    network: Network = Network()
    rate: float = 1e-3

    @pydantic.model_validator(mode="after")
    def _rate_is_positive(self) -> Experiment:
        if self.rate <= 0:
            raise ValueError(f"rate {self.rate} must be above 0")
        return self


TEXT = """\
name: example
rate: 1e-4
network:
  vocab_size: 5
  layer_types: [full, sliding]
  eos: [1, 2]
"""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "example.yaml"
    path.write_text(TEXT)
    return path


def test_yaml_values_have_the_types_one_expects(config_file: Path) -> None:
    config = load_config(Experiment, config_file)
    assert config == Experiment(
        name="example",
        rate=1e-4,
        network=Network(vocab_size=5, layer_types=("full", "sliding"), eos=(1, 2)),
    )


def test_overrides_apply_in_order_and_create_sections(config_file: Path) -> None:
    config = load_config(
        Experiment,
        config_file,
        [
            "network.vocab_size=6",
            "network.vocab_size=7",
            "network.scaling.factor=2",
            "network.eos=null",
            "rate=2e-4",
            "name=a=b",
        ],
    )
    assert config.network.vocab_size == 7
    assert config.network.scaling == Scaling(factor=2.0)
    assert config.network.eos is None
    assert config.rate == 2e-4
    assert config.name == "a=b"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("network.vocab_sizes=3", "`network.vocab_sizes`; did you mean `network.vocab_size`?"),
        (
            "network.scaling.fctor=3",
            "`network.scaling.fctor`; did you mean `network.scaling.factor`",
        ),
        ("vocab_size=3", "unknown key `vocab_size`; did you mean `network.vocab_size`?"),
        ("zzz=1", "unknown key `zzz`; the config has the keys name, network, rate"),
        ("network.vocab_size=ten", "`network.vocab_size` is 'ten'; expected a valid integer"),
        ("network.vocab_size='10'", "`network.vocab_size` is '10'; expected a valid integer"),
        ("network.vocab_size=2.5", "`network.vocab_size` is 2.5; expected a valid integer"),
        (
            "network.scaling.type=ntk",
            "`network.scaling.type` is 'ntk'; expected 'linear' or 'yarn'",
        ),
        ("network.scaling=3", "`network.scaling` is 3; expected a mapping"),
        ("network.eos=x", "`network.eos` is 'x'; expected a valid integer or a list"),
        ("network.layer_types=full", "`network.layer_types` is 'full'; expected a list"),
        ("name=null", "`name` is None; expected a valid string"),
        ("rate=-1", "rate -1.0 must be above 0"),
        ("rate.x=3", "`rate` is 0.0001, which has no keys below it"),
        ("rate", "override 'rate' is not of the form key=value"),
        ("=3", "override '=3' is not of the form key=value"),
        ("name=[", "the value of override 'name=[' is not valid YAML"),
    ],
)
def test_a_faulty_override_is_named(config_file: Path, override: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(Experiment, config_file, [override])
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ("", None, "is empty"),
        ("- a", None, "is not a mapping"),
        ("a: [", None, "is not valid YAML: line 1"),
        ("name: x\nname: y", 2, "key `name` was already given at "),
        ("name: x\nnetwork:\n  scaling:\n    factr: 2", 4, "did you mean `network.scaling.factor`"),
        ("name: x\n\nrate: fast", 3, "`rate` is 'fast'; expected a valid number"),
        ("network: {}", None, "`name` is required and missing"),
        ("nam: x", 1, "unknown key `nam`; did you mean `name`?"),
        ("name: !!python/object:os.system {}", None, "is not valid YAML"),
    ],
)
def test_a_faulty_file_is_named_with_its_line(
    tmp_path: Path, text: str, line: int | None, expected: str
) -> None:
    path = tmp_path / "faulty.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(Experiment, path)
    first = str(caught.value).splitlines()[0]
    assert expected in first
    assert str(path) in first
    if line is not None:
        assert f"{path}:{line}:" in first


def test_a_missing_file_names_its_neighbour(config_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"did you mean .*example\.yaml\?"):
        load_config(Experiment, config_file.with_name("exampel.yaml"))
