import math

import pytest
import torch

from lean_laguna.spec.confidence import (
    calibration_error,
    fit_temperatures,
    position_temperatures,
    survival,
    survival_error,
)


def test_survival_is_the_product_of_scaled_sigmoids():
    logits = torch.tensor([[0.3, -1.2, 2.0]])
    chances = [1 / (1 + math.exp(-z / t)) for z, t in zip([0.3, -1.2, 2.0], [2.0, 0.5, 0.5], strict=True)]
    expected = [chances[0], chances[0] * chances[1], math.prod(chances)]
    assert survival(logits, (2.0, 0.5))[0].tolist() == pytest.approx(expected, rel=1e-6)
    assert position_temperatures((), 2) == [1.0, 1.0]
    assert position_temperatures((3.0, 2.0, 1.0), 2) == [3.0, 2.0]


def test_the_error_is_the_gap_of_each_bin_by_hand():
    predicted = torch.tensor([0.1, 0.12, 0.9, 0.95])
    happened = torch.tensor([False, True, True, True])
    gap_low, gap_high = abs(0.22 - 1), abs(0.9 - 1)  # bins of width 0.1: {0.1, 0.12}, {0.9, 0.95}
    found = calibration_error(predicted, happened, num_bins=10)
    assert found == pytest.approx((gap_low + gap_high + abs(0.95 - 1)) / 4, abs=1e-6)


def test_fitted_temperatures_undo_a_wrong_scale():
    generator = torch.Generator().manual_seed(0)
    true = torch.randn(40_000, 3, generator=generator) + 1.0
    happened = torch.rand(true.shape, generator=generator) < torch.sigmoid(true)
    accepted = torch.cumprod(happened.long(), 1).sum(1)
    said = true * torch.tensor([2.0, 0.5, 1.0])  # too sure, too shy, right
    found = fit_temperatures(said, accepted)
    assert found == pytest.approx((2.0, 0.5, 1.0), rel=0.2)
    assert max(survival_error(said, accepted)) > 0.04
    assert max(survival_error(said, accepted, found)) < 0.015
