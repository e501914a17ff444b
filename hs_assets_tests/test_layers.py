"""Residual ids, their conversions to everybody else's numbering, and which sets of them are accepted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hs_assets.errors import ConfigError
from hs_assets.wire.layers import (
    EAGLE3_DEFAULT,
    LayerSet,
    to_hf_index,
    to_layer_input,
    to_layer_output,
    to_speculators_id,
)

KIMI_LAYERS = 61


@pytest.mark.parametrize(
    ("residual_id", "hf_index", "speculators_id", "layer_input", "layer_output"),
    [
        (0, 0, 0, 0, None),  # the embedding output leaves no layer
        (3, 3, 3, 3, 2),
        (31, 31, 31, 31, 30),
        (59, 59, 59, 59, 58),
        (60, 60, 60, 60, 59),
        (61, None, 61, None, 60),  # HF's last entry is post-norm, and no layer takes the final state
    ],
)
def test_conversions_of_a_model_of_61_layers(residual_id, hf_index, speculators_id, layer_input, layer_output):
    assert to_hf_index(residual_id, KIMI_LAYERS) == hf_index
    assert to_speculators_id(residual_id) == speculators_id
    assert to_layer_input(residual_id, KIMI_LAYERS) == layer_input
    assert to_layer_output(residual_id) == layer_output


def test_final_state_is_told_by_the_number_of_layers():
    assert to_hf_index(61, 62) == 61
    assert to_layer_input(61, 62) == 61


def test_slots_and_readable_id():
    layer_set = LayerSet((3, 31, 59), KIMI_LAYERS)
    assert layer_set.residual_ids == (3, 31, 59, 61)
    assert layer_set.id == "r3-31-59-61"


def test_eagle3_default_of_kimi():
    assert LayerSet.choose("eagle3", KIMI_LAYERS) == LayerSet((2, 30, 58), 61)
    assert EAGLE3_DEFAULT == "eagle3"


@pytest.mark.parametrize(("num_layers", "aux"), [(7, (2, 3, 4)), (8, (2, 4, 5)), (36, (2, 18, 33))])
def test_eagle3_default_of_smaller_models(num_layers, aux):
    assert LayerSet.choose("eagle3", num_layers) == LayerSet(aux, num_layers)


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 5, 6])
def test_model_too_small_for_the_default(num_layers):
    with pytest.raises(ConfigError, match=f"a model of {num_layers} layers is too small") as caught:
        LayerSet.choose("eagle3", num_layers)
    got = [2, num_layers // 2, num_layers - 3]
    assert f"\n  got: {got}" in str(caught.value)
    assert "\n  remedy: name the residual ids" in str(caught.value)


def test_explicit_ids_are_taken_as_they_are():
    assert LayerSet.choose([3, 31, 59], KIMI_LAYERS) == LayerSet((3, 31, 59), KIMI_LAYERS)
    assert LayerSet.choose(iter(range(8)), 8) == LayerSet(tuple(range(8)), 8)


def test_unknown_word():
    with pytest.raises(ConfigError, match="unknown name of a layer set") as caught:
        LayerSet.choose("eagle", KIMI_LAYERS)
    assert "'eagle3'" in str(caught.value)
    assert "\n  got: eagle" in str(caught.value)


@pytest.mark.parametrize(
    "aux",
    [
        pytest.param((), id="none"),
        pytest.param((3, 3), id="twice the same"),
        pytest.param((31, 3, 59), id="not ascending"),
        pytest.param((-1, 3), id="negative"),
        pytest.param((3, 61), id="the final one among the auxiliary"),
        pytest.param((3, 62), id="beyond the last layer"),
    ],
)
def test_invalid_sets(aux):
    with pytest.raises(ConfigError, match="these layers are no layer set") as caught:
        LayerSet.choose(aux, KIMI_LAYERS)
    text = str(caught.value)
    assert "each in 0..60" in text
    assert f"\n  got: {list(aux)}" in text
    assert "\n  remedy: a residual id is the input of that decoder layer" in text


@pytest.mark.parametrize(
    "text",
    ["", "r", "r61", "3-31-61", "r3--61", "r3-61-", "r-3-61", "r3-61 ", "r3-61\n", "r3_61", "r3-x-61", "R3-61", "r3-+4-61"],
)
def test_not_an_id(text):
    with pytest.raises(ConfigError, match="not a layer set id"):
        LayerSet.parse(text)


@pytest.mark.parametrize("text", ["r61-3", "r3-3-61", "r31-3-61", "r3-61-61"])
def test_an_id_of_no_layer_set(text):
    with pytest.raises(ConfigError, match="these layers are no layer set"):
        LayerSet.parse(text)


@settings(deadline=None)
@given(st.sets(st.integers(0, 200), min_size=2, max_size=12).map(sorted))
def test_parse_is_the_inverse_of_id(ids):
    layer_set = LayerSet(tuple(ids[:-1]), ids[-1])
    assert LayerSet.parse(layer_set.id) == layer_set
    assert LayerSet.choose(ids[:-1], ids[-1]) == layer_set
