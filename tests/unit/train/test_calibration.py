import torch

from lean_laguna.spec.confidence import Calibration, fit_calibration, survival_error
from lean_laguna.train.calibration import walk


def table(accepted):
    """Logits [M, W, G] that tell where they are from: sequence, place, draft."""
    places = torch.arange(accepted.numel()).view(*accepted.shape, 1)
    return places * 10.0 + torch.arange(4), accepted


def test_the_walk_goes_on_after_the_draft_that_failed_or_the_last_one_sent():
    accepted = torch.tensor([[4, 0, 1, 4, 4, 2, 0, 0, 0, 0], [0, 3, 0, 0, 0, 4, 0, 0, 0, 0]])
    logits, found, owners = walk(*table(accepted), num_served=2)
    assert owners.tolist() == [0, 0, 1, 1, 1, 1]
    assert logits[:, 0].tolist() == [0, 30, 100, 110, 140, 150]  # of the first, 6 would pass the end
    assert found.tolist() == [4, 4, 0, 3, 0, 4]
    assert walk(*table(accepted), num_served=4)[0][:, 0].tolist() == [0, 50, 100, 110, 150]


def test_text_too_short_for_a_block_gives_none():
    logits, accepted, owners = walk(*table(torch.zeros(2, 3, dtype=torch.int64)), num_served=2)
    assert (logits.shape, accepted.shape, owners.shape) == ((0, 4), (0,), (0,))


def test_a_fit_on_longer_blocks_says_too_little_of_shorter_ones():
    """Easy stretches, unseen by the head, make many short blocks and few long ones."""
    generator = torch.Generator().manual_seed(0)
    stretch = torch.rand(150, 1, 32, generator=generator).lt(0.5).repeat_interleave(16, 2).view(150, -1)
    right = torch.rand(stretch.shape, generator=generator) < torch.where(stretch, 0.98, 0.4)
    lengths = torch.zeros(150, stretch.shape[1], dtype=torch.int64)
    for place in range(stretch.shape[1] - 2, -1, -1):
        lengths[:, place] = torch.where(right[:, place + 1], lengths[:, place + 1] + 1, 0)
    accepted = lengths.clamp(max=12)
    logits = torch.randn(*accepted.shape, 12, generator=generator)
    served, own, _ = walk(logits, accepted, 3)
    errors = {
        drafts: max(survival_error(fit(*walk(logits, accepted, drafts)).survival(served), own)[:3])
        for drafts in (3, 12)
    }
    assert errors[3] < 0.02
    assert errors[12] > 0.05


def fit(logits, accepted, _) -> Calibration:
    return fit_calibration(logits, accepted)
