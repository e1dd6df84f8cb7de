"""Prices follow what steps took, row count by row count, and are sent when they have changed."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; it comes with PyTorch's CUDA builds")

from lean_laguna.engine import gpu_costs
from lean_laguna.engine.gpu_costs import Prices, RowCosts, measure_rows
from lean_laguna.engine.gpu_state import Block
from lean_laguna.spec.draft_schedule import StepCosts


def test_prices_are_the_table_and_what_steps_took_longer():
    table = [[1.0 + 0.1 * rows for rows in range(17)], [2.0 + 0.1 * rows for rows in range(17)]]
    costs = RowCosts((8, 16), table)
    np.testing.assert_allclose(costs.prices(3.0), 3 * np.array(table), rtol=1e-6)
    for _ in range(3):
        costs.observe(2, 1.2 + 0.5, cols=8)
        costs.observe(6, 1.6 + 0.1, cols=8)
    narrow, wide = costs.prices(1.0)
    np.testing.assert_allclose(narrow[[1, 2]], [1.1, 1.7], rtol=1e-6)  # one row takes what it took at start
    np.testing.assert_allclose(narrow[[3, 6, 8]], [1.7, 1.7, 1.9], rtol=1e-6)  # more rows are never cheaper
    np.testing.assert_allclose(wide, table[1], rtol=1e-6)


def test_without_a_table_every_step_costs_the_same():
    costs = RowCosts((8, 16))
    costs.observe(3, 7.0, cols=16)
    assert len(set(costs.prices(2.0).flat)) == 1


def test_prices_are_sent_when_they_change():
    programs = SimpleNamespace(device=torch.device("cpu"), bounds=torch.zeros(35))
    prices = Prices(programs, RowCosts((8, 16)))
    costs = StepCosts([], 2.0, least=0.25)
    for _ in range(2):
        prices.set(costs)
        assert torch.equal(programs.bounds, torch.tensor([0.25, *[2.0] * 34]))
        prices.set(None)
        assert not programs.bounds.any()
    prices.set(StepCosts([], 2.01, least=0.251))
    assert programs.bounds[:2].tolist() == [0.25, 2.0]
    prices.set(StepCosts([], 2.01, least=0.3))
    assert torch.equal(programs.bounds[:2], torch.tensor([0.3, 2.01]))


class Programs:
    """Launches that take so long by rows; the first two of a kind compile and capture."""

    device, widths, most_rows = torch.device("cpu"), (8, 32), 32

    def __init__(self):
        self.state, self.target = Block.allocate("cpu"), SimpleNamespace(embed=torch.zeros(50, 4))
        self.runs, self.clock = {}, 0.0

    def run(self, name, cols):
        num_runs = self.runs[name, cols] = self.runs.get((name, cols), 0) + 1
        num_rows = int(self.state.fields["num_rows"][0])
        self.clock += 0.02 if num_runs <= 2 else 1e-3 + 1e-4 * num_rows + 2e-3 * (name == "verify")


def test_the_first_launches_of_a_width_say_nothing_of_its_rows(monkeypatch):
    programs = Programs()
    monkeypatch.setattr(gpu_costs, "mark", lambda _: programs.clock)
    for table, base in zip(measure_rows(programs), (3e-3, 1e-3), strict=True):
        assert table[1][4:] == pytest.approx([base + 1e-4 * rows for rows in range(4, 33)])
        assert table[0][1:9] == pytest.approx([base + 1e-4 * rows for rows in range(1, 9)])
