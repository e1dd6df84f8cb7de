import pytest
import torch
import torch.nn.functional as F

from lean_laguna.kernels import moe as module
from lean_laguna.kernels.moe import MAX_BANK, moe_experts, route


def bank(experts, hidden, width, generator):
    gate_up = torch.randn(experts, hidden, 2 * width, generator=generator).transpose(1, 2)
    down = torch.randn(experts, width, hidden, generator=generator).transpose(1, 2)
    return gate_up, down


def choices(rows, experts, top_k, generator):
    weights, expert_ids = route(torch.randn(rows, experts, generator=generator), torch.zeros(experts), top_k)
    return weights, expert_ids


def naive(x, gate_up, down, weights, expert_ids):
    out = torch.zeros(x.shape[0], down.shape[1], dtype=torch.float64)
    for row in range(x.shape[0]):
        for weight, expert in zip(weights[row].double(), expert_ids[row].tolist(), strict=True):
            gate, up = (gate_up[expert].double() @ x[row].double()).chunk(2)
            out[row] += weight * (down[expert].double() @ (F.silu(gate) * up))
    return out


@pytest.mark.parametrize(("experts", "top_k"), [(4, 1), (8, 2), (MAX_BANK, 4), (40, 3)])
def test_it_sums_the_chosen_experts(experts, top_k, generator):
    gate_up, down = bank(experts, 24, 12, generator)
    x = torch.randn(16, 24, generator=generator)
    weights, expert_ids = choices(16, experts, top_k, generator)
    expected = naive(x, gate_up, down, weights, expert_ids)
    found = moe_experts(x, gate_up, down, weights, expert_ids)
    # float32 against float64, sums of 12 x 24 products.
    assert (found - expected).abs().max() / expected.abs().max() < 1e-5


@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (MAX_BANK, 2), (MAX_BANK, 5), (40, 3)])
def test_a_row_has_the_same_bits_alone_and_anywhere(experts, top_k, generator):
    gate_up, down = bank(experts, 24, 20, generator)
    x = torch.randn(80, 24, generator=generator)
    weights, expert_ids = choices(80, experts, top_k, generator)
    parts = (x, weights, expert_ids)
    alone = torch.cat(
        [
            moe_experts(row, gate_up, down, w, ids)
            for row, w, ids in zip(*(p.split(1) for p in parts), strict=True)
        ]
    )
    for count in [*range(1, 18), 24, 32, 40, 80]:
        for start in (0, 3):
            rows = slice(start, start + count)
            if start + count <= 80:
                found = moe_experts(x[rows], gate_up, down, weights[rows], expert_ids[rows])
                assert torch.equal(found, alone[rows]), (start, count)
    loud = x.clone()
    loud[:5] *= 1e6
    assert torch.equal(moe_experts(loud[:8], gate_up, down, weights[:8], expert_ids[:8])[5:], alone[5:8])


@pytest.mark.parametrize("few", [0, 100])
@pytest.mark.parametrize("many", [0, 100])
def test_every_way_to_run_a_bank_has_the_same_bits(monkeypatch, few, many, generator):
    gate_up, down = bank(16, 32, 24, generator)
    x = torch.randn(32, 32, generator=generator)
    weights, expert_ids = choices(32, 16, 2, generator)
    expected = moe_experts(x, gate_up, down, weights, expert_ids)
    monkeypatch.setattr(module, "FEW_EXPERTS", few)
    monkeypatch.setattr(module, "_MANY_TILES", many)
    assert torch.equal(moe_experts(x, gate_up, down, weights, expert_ids), expected)


def test_contiguous_experts_serve_as_well(generator):
    gate_up, down = (part.contiguous() for part in bank(8, 24, 12, generator))
    x = torch.randn(9, 24, generator=generator)
    weights, expert_ids = choices(9, 8, 2, generator)
    alone = moe_experts(x[4:5], gate_up, down, weights[4:5], expert_ids[4:5])
    assert torch.equal(moe_experts(x, gate_up, down, weights, expert_ids)[4:5], alone)


def test_equal_scores_go_to_the_lower_expert():
    logits = torch.tensor([[0.5, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    _, expert_ids = route(logits, torch.zeros(4), 2)
    assert expert_ids.tolist() == [[1, 2], [0, 1]]


def test_the_bias_steers_the_choice_and_not_the_weight():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    weights, expert_ids = route(logits, torch.tensor([0.0, 0.0, 1.0]), 1, norm_topk=False)
    assert expert_ids.tolist() == [[2]]
    assert torch.equal(weights, torch.sigmoid(torch.tensor([[0.0]])))


def test_weights_are_shares_of_the_chosen_scores(generator):
    logits = torch.randn(6, 10, generator=generator)
    weights, expert_ids = route(logits, torch.zeros(10), 3, cap=0.5)
    scores = torch.sigmoid(torch.tanh(logits / 0.5) * 0.5).gather(1, expert_ids)
    torch.testing.assert_close(weights, scores / scores.sum(-1, keepdim=True))
    assert (scores.diff() <= 0).all()


@pytest.mark.parametrize("experts", [7, 16, 20, 256])
def test_routes_have_the_same_bits_alone_and_anywhere(experts, generator):
    logits = torch.randn(200, experts, generator=generator)
    bias = 0.1 * torch.randn(experts, generator=generator)
    whole = route(logits, bias, 3, cap=2.0)
    for start, count in ((0, 1), (3, 1), (7, 8), (100, 16), (31, 150)):
        found = route(logits[start : start + count], bias, 3, cap=2.0)
        assert torch.equal(found[0], whole[0][start : start + count])
        assert torch.equal(found[1], whole[1][start : start + count])
