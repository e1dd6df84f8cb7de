import math

import pytest
import torch

from lean_laguna.spec.confidence import Calibration, calibration_error, fit_calibration, survival_error


def test_survival_is_the_product_of_scaled_and_shifted_sigmoids():
    logits = torch.tensor([[0.3, -1.2, 2.0]])
    arguments = [0.3 / 2.0 + 1.0, -1.2 / 0.5 - 1.0, 2.0 / 0.5 - 1.0]
    chances = [1 / (1 + math.exp(-z)) for z in arguments]
    expected = [chances[0], chances[0] * chances[1], math.prod(chances)]
    calibration = Calibration((2.0, 0.5), (1.0, -1.0))
    assert calibration.survival(logits)[0].tolist() == pytest.approx(expected, rel=1e-6)
    assert Calibration().padded(2) == ([1.0, 1.0], [0.0, 0.0])
    assert Calibration((3.0, 2.0, 1.0)).padded(2)[0] == [3.0, 2.0]


def test_the_error_is_the_gap_of_each_bin_by_hand():
    predicted = torch.tensor([0.1, 0.12, 0.9, 0.95])
    happened = torch.tensor([False, True, True, True])
    gap_low, gap_high = abs(0.22 - 1), abs(0.9 - 1)  # bins of width 0.1: {0.1, 0.12}, {0.9, 0.95}
    found = calibration_error(predicted, happened, num_bins=10)
    assert found == pytest.approx((gap_low + gap_high + abs(0.95 - 1)) / 4, abs=1e-6)


def test_a_fit_undoes_a_wrong_scale_and_a_wrong_level():
    generator = torch.Generator().manual_seed(0)
    true = torch.randn(40_000, 3, generator=generator) + 1.0
    happened = torch.rand(true.shape, generator=generator) < torch.sigmoid(true)
    accepted = torch.cumprod(happened.long(), 1).sum(1)
    said = true * torch.tensor([2.0, 0.5, 1.0]) - torch.tensor([0.0, 0.0, 1.0])  # too sure, too shy, too low
    found = fit_calibration(said, accepted)
    assert found.temperatures == pytest.approx((2.0, 0.5, 1.0), rel=0.1)
    assert found.biases == pytest.approx((0.0, 0.0, 1.0), abs=0.1)
    assert max(survival_error(said, accepted)) > 0.04
    assert max(survival_error(said, accepted, found)) < 0.015


def test_a_position_that_no_block_reached_stays_as_it_was():
    found = fit_calibration(torch.randn(5, 2), torch.zeros(5, dtype=torch.int64))
    assert (found.temperatures[1], found.biases[1]) == (1.0, 0.0)
