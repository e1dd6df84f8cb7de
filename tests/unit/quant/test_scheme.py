"""Bytes and tensors of a quantised linear, by hand."""

from __future__ import annotations

import pytest

from lean_laguna.core.errors import ConfigError
from lean_laguna.quant.arguments import weight_scheme
from lean_laguna.quant.presets import PRESETS, preset
from lean_laguna.quant.scheme import FP8_BLOCK, FP8_CHANNEL, NVFP4, WeightScheme, packed_integer

ROWS, COLUMNS = 512, 2048


def test_nvfp4_takes_four_and_a_half_bits_and_a_global_scale() -> None:
    assert NVFP4.stored_bytes(ROWS, COLUMNS) == ROWS * COLUMNS // 2 + ROWS * COLUMNS // 16 + 4
    assert NVFP4.read_bytes(ROWS, COLUMNS) / (ROWS * COLUMNS) == pytest.approx(4.5 / 8, rel=1e-4)


def test_fp8_block_scales_cover_ragged_edges() -> None:
    assert FP8_BLOCK.scale_shape(130, 200) == (2, 2)
    assert FP8_BLOCK.read_bytes(130, 200, "F32") == 130 * 200 + 4 * 4


def test_integer_groups_pack_codes_by_row_and_zero_points_by_column() -> None:
    scheme = packed_integer(4, 32, symmetric=False)
    tensors = scheme.tensors(48, 64)
    assert tensors["weight_packed"].shape == (48, 8)
    assert tensors["weight_scale"].shape == (48, 2)
    assert tensors["weight_zero_point"].shape == (6, 2)
    assert scheme.stored_bytes(48, 64) - scheme.read_bytes(48, 64) == 16  # weight_shape


def test_a_group_that_does_not_divide_the_columns_is_refused_with_sizes_that_do() -> None:
    with pytest.raises(ConfigError, match=r"groups of 128.*group sizes 64, 32, 16, 8"):
        packed_integer(4, 128).tensors(32, 64)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_survives_its_own_json(name: str) -> None:
    scheme = preset(name.lower(), "x")
    if scheme.activations == "static":
        with pytest.raises(ConfigError, match="need data"):
            scheme.activations_json()
        return
    again = weight_scheme(scheme.weights_json(), scheme.activations_json(), scheme.storage, "x")
    assert again == scheme


def test_names_are_short() -> None:
    named: list[WeightScheme] = [NVFP4, FP8_BLOCK, FP8_CHANNEL, packed_integer(4, 32, False)]
    assert [scheme.name for scheme in named] == [
        "NVFP4", "FP8 block 128x128", "FP8 channel", "INT4 group 32 asymmetric",
    ]  # fmt: skip
