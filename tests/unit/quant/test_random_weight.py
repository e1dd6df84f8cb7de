"""Random codes and scales decode to finite values of the deviation asked for."""

import dataclasses

import pytest
import torch

from lean_laguna.core.errors import ConfigError
from lean_laguna.quant.random_weight import random_weight
from lean_laguna.quant.scheme import FP8_BLOCK, FP8_TENSOR, INT8_CHANNEL, NVFP4, packed_integer


@pytest.mark.parametrize(
    "scheme",
    [
        NVFP4,
        dataclasses.replace(FP8_BLOCK, block=(16, 16)),
        FP8_TENSOR,
        INT8_CHANNEL,
        packed_integer(4, 32),
        packed_integer(8, 16),
    ],
)
def test_values_are_finite_and_of_the_deviation_asked_for(scheme):
    weight = random_weight(scheme, (3, 48, 96), (24, 24), 0.02, torch.Generator().manual_seed(0))
    values = weight.decode()
    assert values.shape == (3, 48, 96)
    assert torch.isfinite(values).all()
    assert values.std().item() == pytest.approx(0.02, rel=0.1)


def test_a_shape_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match="groups of 32"):
        random_weight(packed_integer(4, 32), (8, 40), (8,), 0.02, torch.Generator())
