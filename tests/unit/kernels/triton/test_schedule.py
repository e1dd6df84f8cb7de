"""What is kept of a step's drafts is the best of all ways to keep a prefix of each request."""

import itertools
import math
import random

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; it comes with PyTorch's CUDA builds")

from lean_laguna.kernels.triton.launch import Launch
from lean_laguna.kernels.triton.rows import Rows
from lean_laguna.kernels.triton.schedule import schedule
from lean_laguna.kernels.triton.weights import SparkWeights
from lean_laguna.spec.synthetic import SyntheticAcceptance, draw_words


class Step:
    """Requests with so many drafts each (None: it has ended), and a guess at each draft."""

    def __init__(self, device, drafts, draw):
        self.counts = [0 if n is None else 1 + n for n in drafts]
        self.device, self.starts = device, [sum(self.counts[:r]) for r in range(len(drafts))]
        owner = [r for r, n in enumerate(self.counts) for _ in range(n)]
        self.total = len(owner)
        self.ids, self.seeds = self.ints(range(500, 516)), torch.arange(16, device=device) + 2**33
        self.temperatures = torch.tensor(
            [0.5 * (r % 2) for r in owner] + [0.0] * (16 - self.total), device=device
        )
        self.rows = Rows(
            self.ints([self.total])[:1],
            self.ints([len(drafts)])[:1],
            self.ints(self.starts),
            self.ints(self.counts),
            self.ints(owner),
            self.ints([100 * r + i for r, n in enumerate(self.counts) for i in range(n)]),
        )
        self.guesses = torch.tensor([draw.gauss(0.5, 2) for _ in range(16)], device=device)
        self.scales = torch.tensor([[draw.uniform(0.5, 2) for _ in range(16)] for _ in "gs"], device=device)
        self.offsets = torch.tensor([[draw.gauss(0, 1) for _ in range(16)] for _ in "gs"], device=device)
        self.chances, self.cut = torch.full((16,), -1.0, device=device), self.ints([7] * 16)

    def ints(self, values):
        values = list(values)
        return torch.tensor(values + [0] * (16 - len(values)), dtype=torch.int32, device=self.device)

    def run(self, prices, **options):
        empty = torch.zeros(1, device=self.device)
        schedule(
            self.guesses,
            SparkWeights(empty, empty, None, None, self.scales, self.offsets, False, 15),
            torch.tensor(prices, device=self.device),
            self.chances,
            self.cut,
            self.ids,
            self.seeds,
            self.temperatures,
            self.rows,
            Launch(),
            **options,
        )
        return self.rows.row_count[: len(self.counts)].tolist()

    def chance(self, request, k):
        row = self.starts[request] + k
        guess = self.guesses[row] * self.scales[request % 2, k - 1] + self.offsets[request % 2, k - 1]
        return 1 / (1 + math.exp(-guess))


def best_counts(survival, counts, prices):
    """Try every number of drafts of each request."""
    best = (-1e9, ())
    for kept in itertools.product(*[range(max(1, n)) for n in counts]):
        rows = sum(n + 1 for n, c in zip(kept, counts, strict=True) if c)
        expected = sum(
            1 + sum(chances[:n]) for n, chances, c in zip(kept, survival, counts, strict=True) if c
        )
        best = max(
            best,
            (expected - prices[rows], tuple(n + 1 if c else 0 for n, c in zip(kept, counts, strict=True))),
        )
    return list(best[1])


@pytest.mark.parametrize("drafts", [[7], [15], [3, None, 2, 4], [0, 2, 0, 1, 1]])
def test_the_rows_kept_bring_most_over_what_their_time_is_worth(device, drafts):
    draw = random.Random(len(drafts))
    for slope in (0.02, 0.2):
        step = Step(device, drafts, draw)
        prices = [1 + slope * n ** draw.uniform(0.5, 1.5) for n in range(17)]
        before = step.rows.positions.tolist()
        survival = [
            list(itertools.accumulate((step.chance(r, k) for k in range(1, n)), lambda a, b: a * b))
            for r, n in enumerate(step.counts)
        ]
        found = step.run(prices)
        assert found == best_counts(survival, step.counts, prices)
        rows = [step.starts[r] + i for r, n in enumerate(found) for i in range(n)]
        assert step.rows.num_rows.item() == len(rows)
        assert step.ids[: len(rows)].tolist() == [500 + row for row in rows]
        assert step.seeds[: len(rows)].tolist() == [2**33 + row for row in rows]
        assert step.rows.positions[: len(rows)].tolist() == [before[row] for row in rows]
        assert step.rows.row_request[: len(rows)].tolist() == [
            r for r, n in enumerate(found) for _ in range(n)
        ]
        for r, n in enumerate(found):
            assert step.cut[r] == 7 + step.counts[r] - n
            if n:
                assert step.rows.row_start[r] == sum(found[:r])
            for k in range(1, step.counts[r]):
                assert step.chances[step.starts[r] + k].item() == pytest.approx(step.chance(r, k), rel=1e-4)


def test_without_prices_everything_is_kept(device):
    step = Step(device, [3, 0, 5], random.Random(1))
    assert step.run([0.0] * 17) == [4, 1, 6]
    assert step.ids[:11].tolist() == list(range(500, 511))
    assert step.cut[:3].tolist() == [7] * 3


def test_chances_of_synthetic_acceptance_are_the_rates_of_the_set_that_a_block_draws(device):
    sets = ((0.9, 0.45, 0.0), (0.5, 0.5, 0.1))
    drawn = set()
    thresholds = torch.tensor(SyntheticAcceptance(sets).thresholds(16), device=device)
    for seed in range(4):
        step = Step(device, [5], random.Random(2))
        seeds = torch.full((16,), seed, device=device)
        kept = step.run([1.0] * 17, thresholds=thresholds, request_seeds=seeds)
        which = draw_words(seed, 0)[1] >> 31
        drawn.add(which)
        assert step.chances[1:6].tolist() == pytest.approx([[0.9, 0.5, 0, 0, 0], [0.5, 1, 0.2, 0, 0]][which])
        assert kept == [3 + which]
    assert drawn == {0, 1}
