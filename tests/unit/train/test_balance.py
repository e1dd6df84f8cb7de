import pytest
import torch

from lean_laguna.train.balance import dead_experts, expert_loads, max_violation, update_biases


def test_loads_count_each_choice():
    ids = [torch.tensor([[0, 1], [1, 2]]), torch.tensor([[3, 0], [3, 0]])]
    assert expert_loads(ids, 4).tolist() == [[1, 2, 1, 0], [2, 0, 0, 2]]


def test_the_bias_moves_against_the_load():
    biases = [torch.zeros(4)]
    loads = torch.tensor([[10.0, 0.0, 5.0, 5.0]])
    update_biases(biases, loads, 0.1)
    assert biases[0].tolist() == pytest.approx([-0.1, 0.1, 0.0, 0.0])
    update_biases(biases, loads, 0.0)
    assert biases[0].tolist() == pytest.approx([-0.1, 0.1, 0.0, 0.0])


def test_violation_and_dead_experts():
    loads = torch.tensor([[5.0, 5.0], [8.0, 0.0]])
    assert max_violation(loads) == pytest.approx(1.0)
    assert dead_experts(loads) == 1
    assert max_violation(torch.ones(2, 4)) == 0.0
