"""Runs of layers that a scan repeats."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxlab.models import ModelConfig
from jaxlab.models.layers import LayerGroup, LayerKind, layer_groups, layer_kinds


def config_with(layer_types: list[str]) -> ModelConfig:
    return ModelConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_layers=len(layer_types),
        num_heads=2,
        sliding_window=4,
        layer_types=tuple(layer_types),
    )


FULL, SLIDING = LayerKind(None), LayerKind(4)


@pytest.mark.parametrize(
    ("layer_types", "groups"),
    [
        (["full"] * 5, [LayerGroup(0, (FULL,), 5)]),
        (["sliding", "full"] * 3, [LayerGroup(0, (SLIDING, FULL), 3)]),
        (
            ["full", "sliding", "sliding", "sliding", "full"],
            [
                LayerGroup(0, (FULL,), 1),
                LayerGroup(1, (SLIDING,), 3),
                LayerGroup(4, (FULL,), 1),
            ],
        ),
        ((["sliding"] * 5 + ["full"]) * 4, [LayerGroup(0, (SLIDING,) * 5 + (FULL,), 4)]),
    ],
)
def test_groups_of_known_models(layer_types, groups):
    assert list(layer_groups(config_with(layer_types))) == groups


@given(st.lists(st.sampled_from(["full", "sliding"]), min_size=1, max_size=20))
def test_groups_cover_every_layer_once_in_order(layer_types):
    config = config_with(layer_types)
    expanded = []
    for group in layer_groups(config):
        assert group.start == len(expanded)
        expanded += list(group.kinds) * group.repeats
    assert tuple(expanded) == layer_kinds(config)
