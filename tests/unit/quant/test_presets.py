"""Named schemes."""

from __future__ import annotations

import pytest

from lean_laguna.core.errors import ConfigError
from lean_laguna.quant.presets import preset


def test_names_are_taken_in_any_case() -> None:
    assert preset("nvfp4a16", "x") == preset("NVFP4A16", "x")
    assert preset("W4A16", "x").group_size == 128


def test_an_unknown_name_comes_with_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match="x: scheme 'FP8_DYNAMC' is not supported; did you mean 'FP8_DYNAMIC'"
    ):
        preset("FP8_DYNAMC", "x")
