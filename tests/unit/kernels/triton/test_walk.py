"""A walk's drafts are the argmax, draft by draft, of logits, the bias by the token before, and noise."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; it comes with PyTorch's CUDA builds")

from lean_laguna.kernels.triton.launch import Launch
from lean_laguna.kernels.triton.rows import Rows
from lean_laguna.kernels.triton.walk import Walk, finish_walk, start_walk, walk_on
from lean_laguna.kernels.triton.weights import SparkWeights
from lean_laguna.spec.noise import gumbel_noise

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
    def make(words=V, *, is_shifted=False, with_markov=True):
        calibration = torch.ones(2, 16, device=device)
        return SparkWeights(
            draw(V, R),
            draw(words, R),
            draw(D + R if with_markov else D),
            draw(1),
            calibration,
            calibration - 1,
            is_shifted,
            7,
        )

    return make


def walked(weights, logits, hidden, ids, temperatures, rows, token_map=None, launch=None):
    launch = launch or Launch()
    walk = Walk.allocate(logits.shape[1], logits.device, len(logits))
    walk.logits[:] = logits
    seeds = torch.arange(len(logits), device=logits.device) + 2**40
    for step in range(1, 8):
        if step == 1:
            start_walk(walk)
        walk_on(
            step,
            weights,
            walk,
            ids,
            seeds,
            temperatures,
            rows,
            launch,
            token_map=token_map,
            keeps_logits=True,
        )
    finish_walk(weights, walk, hidden, ids, rows, launch, token_map=token_map)
    return walk


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
    walk = walked(weights, logits, hidden, ids, temperatures, rows, token_map)
    for start, count in zip(np.cumsum([0, *counts[:-1]]), counts, strict=True):
        before = anchors[start].item()
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
            features = torch.cat([hidden[slot], weights.before[before_row]]).float()
            guess = features @ weights.confidence.float() + weights.confidence_bias.float()
            torch.testing.assert_close(walk.guesses[row], guess[0], atol=20 * tolerance, rtol=tolerance)
    assert torch.equal(ids[13:], anchors[13:])


def test_columns_in_groups_are_walked_like_those_in_one(spark, draw, device, tolerance):
    counts = [4, 1, 3, 8]
    weights, logits, hidden = spark(), draw(64, V, of=torch.float32), draw(64, D)
    ids = torch.randint(V, (64,), dtype=torch.int32, device=device)
    anchors, cold = ids.clone(), torch.zeros(64, device=device)
    walk = walked(weights, logits, hidden, ids, cold, make_rows(device, counts * 4), launch=Launch(64))
    for start in (0, 48):
        rows = slice(start, start + 16)
        own = anchors[rows].clone()
        alone = walked(weights, logits[rows], hidden[rows], own, cold[:16], make_rows(device, counts))
        assert torch.equal(ids[rows], own)
        torch.testing.assert_close(
            walk.guesses[rows], alone.guesses[:16], atol=20 * tolerance, rtol=tolerance
        )


def test_a_confidence_head_may_do_without_the_token_before(spark, draw, device, tolerance):
    weights, rows = spark(with_markov=False), make_rows(device, [3])
    hidden = draw(16, D)
    ids = torch.zeros(16, dtype=torch.int32, device=device)
    walk = walked(weights, draw(16, V, of=torch.float32), hidden, ids, torch.zeros(16, device=device), rows)
    expected = hidden[1:3].float() @ weights.confidence.float() + weights.confidence_bias.float()
    torch.testing.assert_close(walk.guesses[1:3], expected, atol=20 * tolerance, rtol=tolerance)


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
