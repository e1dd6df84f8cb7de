import math

import pytest
import torch

from lean_laguna.spec.confidence import (
    Calibration,
    calibration_error,
    fit_and_check,
    fit_calibration,
    survival_error,
)


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
    assert max(survival_error(Calibration().survival(said), accepted)) > 0.04
    assert max(survival_error(found.survival(said), accepted)) < 0.015


def test_a_position_that_no_block_reached_stays_as_it_was():
    found = fit_calibration(torch.randn(5, 2), torch.zeros(5, dtype=torch.int64))
    assert (found.temperatures[1], found.biases[1]) == (1.0, 0.0)


def test_positions_that_hang_together_are_fitted_to_their_survival():
    generator = torch.Generator().manual_seed(0)
    ease = 2.0 * torch.randn(
        40_000, 1, generator=generator
    )  # of a block: unseen, and all its drafts share it
    happened = torch.rand(40_000, 3, generator=generator) < torch.sigmoid(ease)
    accepted = torch.cumprod(happened.long(), 1).sum(1)
    said = 0.5 * ease + torch.randn(40_000, 3, generator=generator)
    found = fit_calibration(said, accepted)
    assert max(survival_error(found.survival(said), accepted)) < 0.02
    # Each position as if the others were not there: the product of three such chances is too low.
    alone = [fit_calibration(said[:, k : k + 1], happened[:, k].long()) for k in range(3)]
    apart = Calibration(*(tuple(part[0] for part in parts) for parts in zip(
        *((one.temperatures, one.biases) for one in alone), strict=True
    )))  # fmt: skip
    assert max(survival_error(apart.survival(said), accepted)) > 0.05


def test_a_text_says_nothing_about_itself():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(400, 2, generator=generator)
    accepted = (torch.rand(400, 2, generator=generator) < torch.sigmoid(logits)).long().cumprod(1).sum(1)
    owners = torch.arange(400) % 4
    whole, chances = fit_and_check(logits, accepted, owners)
    assert whole == fit_calibration(logits, accepted)
    odd = owners % 2 == 1
    assert torch.equal(chances[odd], fit_calibration(logits[~odd], accepted[~odd]).survival(logits[odd]))
    assert torch.equal(chances[~odd], fit_calibration(logits[odd], accepted[odd]).survival(logits[~odd]))
    _, alone = fit_and_check(logits, accepted, torch.zeros(400, dtype=torch.int64))
    assert torch.equal(alone, whole.survival(logits))
