import math

import pytest
import torch
import torch.nn.functional as F

from lean_laguna.train.losses import decay_weights, dpace_weights, slot_terms, weighted_mean


def test_decay_weights_follow_the_formula():
    assert decay_weights(4, 2.0).tolist() == pytest.approx([math.exp(-k / 2) for k in range(4)])


def test_dpace_weights_follow_the_formula_by_hand():
    q = torch.tensor([[0.9, 0.4, 0.7]])
    mask = torch.tensor([[True, True, True]])
    alpha = 0.5
    s = [alpha + (1 - alpha) * value for value in q[0].tolist()]
    survival = [s[0], s[0] * s[1], s[0] * s[1] * s[2]]
    expected = [sum(survival), survival[1] + survival[2], survival[2]]
    assert dpace_weights(q, mask, alpha)[0].tolist() == pytest.approx(expected)


def test_dpace_gives_masked_slots_no_weight_and_no_say():
    q = torch.rand(5, 6)
    mask = torch.arange(6) < torch.tensor([[0], [1], [3], [6], [4]])
    weights = dpace_weights(q, mask, 0.5)
    assert (weights[~mask] == 0).all()
    changed = torch.where(mask, q, torch.rand_like(q))
    assert torch.equal(weights, dpace_weights(changed, mask, 0.5))
    assert not dpace_weights(q.requires_grad_(), mask, 0.5).requires_grad


def test_chunks_give_the_values_and_gradients_of_the_whole():
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(11, 6, generator=generator)
    labels = torch.randint(11, (5, 3), generator=generator)
    teacher = torch.randn(5, 3, 6, generator=generator)
    results = []
    for chunk in (1000, 4):
        hidden = torch.randn(5, 3, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
        terms = slot_terms(
            (hidden,), labels, lambda rows: F.linear(rows, head), teacher,
            lambda rows: F.linear(rows, head), chunk_rows=chunk,
        )  # fmt: skip
        (terms.nll + terms.l1 + terms.kl).sum().backward()
        values = (terms.nll, terms.l1, terms.kl)
        results.append((*(v.detach() for v in values), terms.correct, terms.agrees, hidden.grad))
    for whole, chunked in zip(*results, strict=True):
        torch.testing.assert_close(whole, chunked)


def test_the_mean_does_not_depend_on_the_scale_of_the_weights():
    nll, weights = torch.rand(4, 3), torch.rand(4, 3)
    mask = torch.rand(4, 3) < 0.7
    expected = (nll * weights)[mask].sum() / weights[mask].sum()
    assert float(weighted_mean(nll, weights, mask)) == pytest.approx(float(expected), rel=1e-6)
    assert float(weighted_mean(nll, 10 * weights, mask)) == pytest.approx(float(expected), rel=1e-6)
