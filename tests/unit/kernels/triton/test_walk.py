"""A walk's drafts are the argmax, draft by draft, of logits, the bias by the token before, and noise.

It stops where what the drafts so far say of the next one is too little.
"""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; it comes with PyTorch's CUDA builds")

from lean_laguna.kernels.triton.launch import Launch
from lean_laguna.kernels.triton.rows import Rows
from lean_laguna.kernels.triton.walk import Chances, Walk, finish_walk, start_walk, walk_on
from lean_laguna.kernels.triton.weights import SparkWeights
from lean_laguna.spec.noise import gumbel_noise
from lean_laguna.spec.synthetic import SyntheticAcceptance, draw_words

V, R, D = 83, 24, 20


def make_rows(device, counts):
    def ints(values):
        return torch.tensor(list(values) + [0] * (64 - len(values)), dtype=torch.int32, device=device)

    starts = [sum(counts[:r]) for r in range(len(counts))]
    return Rows(
        ints([sum(counts)])[:1],
        ints([len(counts)])[:1],
        ints(starts),
        ints(counts),
        ints([r for r, n in enumerate(counts) for _ in range(n)]),
        ints([50 * (r + 1) + i for r, n in enumerate(counts) for i in range(n)]),
    )


@pytest.fixture
def spark(draw, device):
    def make(words=V, *, is_shifted=False):
        scales = 0.5 + torch.arange(32, device=device).view(2, 16) / 32
        return SparkWeights(
            draw(V, R),
            draw(words, R),
            draw(D),
            draw(1),
            draw(V, of=torch.float32),
            scales,
            0.7 - scales,
            is_shifted,
            7,
        )

    return make


def walked(weights, logits, hidden, ids, temperatures, rows, token_map=None, launch=None, least=0.0, **rates):
    """Walk seven drafts; returns the walk and its chances."""
    launch = launch or Launch()
    walk = Walk.allocate(logits.shape[1], logits.device, len(logits))
    walk.logits[:] = logits
    seeds = torch.arange(len(logits), device=logits.device) + 2**40
    own, reached, given = (torch.full((64,), float("nan"), device=logits.device) for _ in range(3))
    chances = Chances(own, reached, given, torch.tensor([least], device=logits.device), **rates)
    start_walk(weights, walk, rows, launch, hidden=hidden, chances=chances)
    for step in range(1, 8):
        walk_on(
            step,
            weights,
            walk,
            ids,
            seeds,
            temperatures,
            rows,
            launch,
            chances=chances,
            token_map=token_map,
            keeps_logits=True,
        )
    finish_walk(walk, ids, rows, launch, token_map=token_map)
    return walk, chances


def chance(guess, row, index, temperatures, weights):
    """Return what a confidence logit means after calibration."""
    kind = int(temperatures[row] > 0)
    return torch.sigmoid(guess * weights.scales[kind, index - 1] + weights.offsets[kind, index - 1])


@pytest.mark.parametrize("is_shifted", [False, True])
@pytest.mark.parametrize("words", [V, 50])
def test_each_draft_follows_from_the_one_before(spark, draw, device, tolerance, is_shifted, words):
    counts = [4, 1, 3, 0, 5]
    weights, rows = spark(words, is_shifted=is_shifted), make_rows(device, counts)
    token_map = None
    if words != V:
        token_map = (torch.randperm(V)[:words].sort().values - torch.arange(words)).to(device)
    logits, hidden = draw(16, words, of=torch.float32), draw(16, D)
    ids = torch.randint(V, (16,), dtype=torch.int32, device=device)
    anchors = ids.clone()
    temperatures = torch.tensor([0.8] * 4 + [0.0] * 4 + [1.2] * 8, device=device)
    walk, chances = walked(weights, logits, hidden, ids, temperatures, rows, token_map)
    for start, count in zip(np.cumsum([0, *counts[:-1]]), counts, strict=True):
        before, reached = anchors[start].item(), 1.0
        for row in range(start, start + count):
            if row == start:
                assert ids[row] == anchors[row]
                continue
            slot = row - is_shifted
            scores = logits[slot] + weights.bias.float() @ weights.before[before].float()
            torch.testing.assert_close(walk.logits[slot], scores, atol=200 * tolerance, rtol=tolerance)
            scores = walk.logits[slot].double().cpu().numpy()
            temperature = temperatures[row].item()
            if temperature:
                position = rows.positions[row].item()
                scores = scores / temperature + gumbel_noise([2**40 + row], [position], words)[0]
            found = int(scores.argmax())
            before_row, before = before, found + (0 if token_map is None else token_map[found].item())
            assert ids[row] == before
            guess = hidden[slot].float() @ weights.confidence.float() + weights.confidence_bias.float()
            guess += weights.after[before_row]
            expected = chance(guess[0], row, row - int(start), temperatures, weights)
            reached = reached * expected
            torch.testing.assert_close(chances.given[row], expected, atol=20 * tolerance, rtol=tolerance)
            torch.testing.assert_close(chances.reached[row], reached, atol=20 * tolerance, rtol=tolerance)
    assert torch.equal(ids[13:], anchors[13:])


def test_columns_in_groups_are_walked_like_those_in_one(spark, draw, device, tolerance):
    counts = [4, 1, 3, 8]
    weights, logits, hidden = spark(), draw(64, V, of=torch.float32), draw(64, D)
    ids = torch.randint(V, (64,), dtype=torch.int32, device=device)
    anchors, cold = ids.clone(), torch.zeros(64, device=device)
    _, whole = walked(weights, logits, hidden, ids, cold, make_rows(device, counts * 4), launch=Launch(64))
    for start in (0, 48):
        rows = slice(start, start + 16)
        own = anchors[rows].clone()
        _, alone = walked(weights, logits[rows], hidden[rows], own, cold[:16], make_rows(device, counts))
        assert torch.equal(ids[rows], own)
        torch.testing.assert_close(
            whole.given[rows], alone.given[:16], atol=20 * tolerance, rtol=tolerance, equal_nan=True
        )


def test_a_drafter_may_say_no_chances(spark, draw, device):
    weights, rows = spark(), make_rows(device, [4])
    ids = torch.randint(V, (16,), dtype=torch.int32, device=device)
    logits, cold, expected = draw(16, V, of=torch.float32), torch.zeros(16, device=device), ids.clone()
    walked(weights, logits, draw(16, D), expected, cold, rows)
    walk = Walk.allocate(V, device)
    walk.logits[:] = logits
    start_walk(weights, walk, rows, Launch())
    for step in range(1, 4):
        walk_on(step, weights, walk, ids, cold.long(), cold, rows, Launch())
    finish_walk(walk, ids, rows, Launch())
    assert torch.equal(ids, expected)


@pytest.mark.parametrize("least", [0.15, 0.3, 1.0])
def test_no_draft_is_made_that_goes_on_too_rarely(spark, draw, device, least):
    """The drafts before are as without a limit; what is not made leaves its id."""
    counts, weights = [8, 1, 4, 0, 3], spark()
    weights.confidence.mul_(0.2)
    logits, hidden = draw(16, V, of=torch.float32), draw(16, D)
    before = torch.randint(V, (16,), dtype=torch.int32, device=device)
    temperatures = torch.tensor([0.8] * 9 + [0.0] * 7, device=device)
    ids, stopped, rows = before.clone(), before.clone(), make_rows(device, counts)
    _, every = walked(weights, logits, hidden, ids, temperatures, rows)
    _, chances = walked(weights, logits, hidden, stopped, temperatures, rows, least=least)
    num_made = []
    for start, count in zip(np.cumsum([0, *counts[:-1]]), counts, strict=True):
        is_on, reached, last = True, 1.0, 1.0
        for row in range(start + 1, start + count):
            is_on = is_on and reached * last >= least
            num_made.append(is_on)
            if not is_on:
                assert stopped[row] == before[row]
                assert chances.given[row] == -1
                continue
            last = every.given[row].item()
            reached *= last
            assert stopped[row] == ids[row]
            assert chances.given[row] == every.given[row]
            assert chances.reached[row].item() == pytest.approx(reached, rel=1e-5)
    assert 3 <= sum(num_made) < len(num_made), "the first of each is always made"


def test_chances_of_synthetic_acceptance_are_the_rates_of_the_set_that_a_block_draws(spark, draw, device):
    sets, drawn = ((0.9, 0.45, 0.0), (0.5, 0.5, 0.1)), set()
    rates = torch.tensor(SyntheticAcceptance(sets).thresholds(16), device=device)
    for seed in range(4):
        seeds = torch.full((16,), seed, device=device)
        _, chances = walked(
            spark(),
            draw(16, V, of=torch.float32),
            draw(16, D),
            torch.zeros(16, dtype=torch.int32, device=device),
            torch.zeros(16, device=device),
            make_rows(device, [6]),
            thresholds=rates,
            request_seeds=seeds,
        )
        which = draw_words(seed, 50)[1] >> 31
        drawn.add(which)
        assert chances.given[1:6].tolist() == pytest.approx([[0.9, 0.5, 0, 0, 0], [0.5, 1, 0.2, 0, 0]][which])
        assert chances.reached[1:5].tolist() == pytest.approx([*sets[which], 0], abs=1e-6)
    assert drawn == {0, 1}


def test_equal_scores_go_to_the_lower_id_and_negative_ones_are_ordered(spark, device):
    weights, rows = spark(), make_rows(device, [2])
    weights.bias.zero_()
    logits = torch.full((16, V), -9.0, device=device)
    logits[1, [70, 11, 30]] = -2.5
    ids = torch.zeros(16, dtype=torch.int32, device=device)
    walked(
        weights,
        logits,
        torch.zeros(16, D, device=device, dtype=weights.bias.dtype),
        ids,
        logits[:, 0] * 0,
        rows,
    )
    assert ids[1] == 11
