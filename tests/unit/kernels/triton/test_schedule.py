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
from lean_laguna.kernels.triton.walk import Chances


class Step:
    """Requests with so many drafts each (None: it has ended), some not made, and a chance of each draft."""

    def __init__(self, device, drafts, draw, unmade=None):
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
        chances = [draw.random() for _ in range(16)]
        self.given, self.cut = torch.tensor(chances, device=device), self.ints([7] * 16)
        self.skipped = self.ints([5] * 16)
        for r, start in enumerate(self.starts):
            if unmade is not None and self.counts[r]:
                self.given[start + 1 + unmade[r] : start + self.counts[r]] *= -1

    def ints(self, values):
        values = list(values)
        return torch.tensor(values + [0] * (16 - len(values)), dtype=torch.int32, device=self.device)

    def run(self, prices):
        reached = torch.zeros(16, device=self.device)
        for r, start in enumerate(self.starts):
            for k in range(1, self.counts[r]):
                reached[start + k] = math.prod(self.chance(r, j) for j in range(1, k + 1))
        schedule(
            Chances(reached, reached, self.given, torch.zeros(1, device=self.device)),
            torch.tensor(prices, device=self.device),
            self.cut,
            self.skipped,
            self.ids,
            self.seeds,
            self.temperatures,
            self.rows,
            Launch(),
        )
        return self.rows.row_count[: len(self.counts)].tolist()

    def chance(self, request, k):
        return abs(self.given[self.starts[request] + k].item())


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


def test_without_prices_everything_is_kept(device):
    step = Step(device, [3, 0, 5], random.Random(1))
    assert step.run([0.0] * 17) == [4, 1, 6]
    assert step.ids[:11].tolist() == list(range(500, 511))
    assert step.cut[:3].tolist() == [7] * 3


def test_what_was_not_made_is_not_sent(device):
    unmade = [2, 0, 5]
    step = Step(device, [4, 3, 5], random.Random(3), unmade)
    free = [1.0] * 17  # more rows cost nothing
    assert step.run(free) == [3, 1, 6]
    assert step.ids[:10].tolist() == [500, 501, 502, 505, 509, 510, 511, 512, 513, 514]
    assert step.cut[:3].tolist() == [7] * 3
    assert step.skipped[:3].tolist() == [5 + 2, 5 + 3, 5]
    assert Step(device, [4, 3, 5], random.Random(3), unmade).run([0.0] * 17) == [3, 1, 6]
