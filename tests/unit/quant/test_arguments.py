"""One group's arguments: defaults that are inferred, and combinations that no format has."""

from __future__ import annotations

from typing import Any

import pytest

from lean_laguna.core.errors import ConfigError
from lean_laguna.quant.arguments import kv_scheme, weight_scheme

INT8 = {"num_bits": 8, "type": "int"}
FP8 = {"num_bits": 8, "type": "float"}
DYNAMIC = {"num_bits": 8, "dynamic": True, "strategy": "token"}


@pytest.mark.parametrize(
    ("weights", "strategy"),
    [
        ({}, "tensor"),
        ({"group_size": -1}, "channel"),
        ({"group_size": 64}, "group"),
        ({"group_size": 64, "strategy": "GROUP"}, "group"),
    ],
)
def test_the_strategy_is_told_by_the_group_size(weights: dict[str, Any], strategy: str) -> None:
    assert weight_scheme({**INT8, **weights}, None, None, "x").strategy == strategy


@pytest.mark.parametrize(
    ("weights", "activations", "storage"),
    [
        (INT8, None, "pack-quantized"),
        (INT8, DYNAMIC, "int-quantized"),
        (FP8, None, "naive-quantized"),
        (FP8, DYNAMIC, "float-quantized"),
        ({"num_bits": 4, "type": "int", "group_size": 32}, DYNAMIC, "pack-quantized"),
    ],
)
def test_the_layout_is_told_by_the_numbers(weights: Any, activations: Any, storage: str) -> None:
    assert weight_scheme(weights, activations, None, "x").storage == storage


def test_how_activations_are_scaled_must_be_a_known_word() -> None:
    message = "x: input_activations: 'dynamic' must be true, false or 'local', found 'lokal'"
    with pytest.raises(ConfigError, match=message):
        weight_scheme(FP8, {**DYNAMIC, "dynamic": "lokal"}, None, "x")


def test_activations_with_stored_scales_are_told_from_dynamic_ones() -> None:
    assert weight_scheme(FP8, DYNAMIC, None, "x").activations == "dynamic"
    assert weight_scheme(FP8, {**DYNAMIC, "dynamic": False}, None, "x").activations == "static"
    assert weight_scheme(FP8, {**DYNAMIC, "dynamic": "local"}, None, "x").activations == "static"


@pytest.mark.parametrize(
    ("weights", "storage", "message"),
    [
        ({"num_bits": 4, "type": "int", "group_size": 32}, "int-quantized", "stored as 'pack-quantized'"),
        ({**INT8, "strategy": "block", "block_structure": [8, 8]}, None, "'block' belongs to 8-bit floats"),
        ({**FP8, "strategy": "block"}, None, "'block_structure' must be two whole numbers"),
        ({**FP8, "strategy": "tensor_group", "group_size": 16}, None, "belongs to 4-bit floats"),
        ({**INT8, "strategy": "group"}, None, "needs a 'group_size' above 0"),
        (INT8, "mxfp4-pack-quantized", r"\(MXFP4\) is not supported"),
        (INT8, ["pack-quantized"], r"'format' must be a text, found \['pack-quantized'\]"),
        (INT8, {"a": 1}, "'format' must be a text, found {'a': 1}"),
        (INT8, "packed", "format 'packed' is unknown; did you mean 'pack-quantized'"),
    ],
)
def test_combinations_that_no_format_has_are_refused(weights: Any, storage: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        weight_scheme(weights, None, storage, "x")


def test_one_scheme_of_keys_and_values_is_known() -> None:
    assert kv_scheme(None, "x") is False
    assert kv_scheme({**FP8, "symmetric": True, "dynamic": False}, "x") is True
    with pytest.raises(ConfigError, match="one scale per layer"):
        kv_scheme({**FP8, "strategy": "attn_head"}, "x")
