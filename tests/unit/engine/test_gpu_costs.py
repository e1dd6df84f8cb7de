"""Prices follow what steps took, row count by row count, and are sent when they have changed."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; it comes with PyTorch's CUDA builds")

from lean_laguna.engine.gpu_costs import Prices, RowCosts


def test_prices_are_the_table_and_what_steps_took_longer():
    table = [[1.0 + 0.1 * rows for rows in range(17)], [2.0 + 0.1 * rows for rows in range(17)]]
    costs = RowCosts((8, 16), table)
    np.testing.assert_allclose(costs.prices(3.0), 3 * np.array(table), rtol=1e-6)
    for _ in range(3):
        costs.observe(2, 1.2 + 0.5, cols=8)
        costs.observe(6, 1.6 + 0.1, cols=8)
    narrow, wide = costs.prices(1.0)
    np.testing.assert_allclose(narrow[[1, 2]], [1.6, 1.7], rtol=1e-6)
    np.testing.assert_allclose(narrow[[3, 6, 8]], [1.7, 1.7, 1.9], rtol=1e-6)  # more rows are never cheaper
    np.testing.assert_allclose(wide, table[1], rtol=1e-6)


def test_without_a_table_every_step_costs_the_same():
    costs = RowCosts((8, 16))
    costs.observe(3, 7.0, cols=16)
    assert len(set(costs.prices(2.0).flat)) == 1


def test_prices_are_sent_when_they_change():
    programs = SimpleNamespace(device=torch.device("cpu"), prices=torch.zeros(2, 17))
    prices = Prices(programs, RowCosts((8, 16)))
    prices.set(2.0)
    assert torch.equal(programs.prices, torch.full((2, 17), 2.0))
    prices.set(2.01)
    assert programs.prices[0, 0] == 2.0
    prices.set(None)
    assert not programs.prices.any()
