import pytest
import torch

from lean_laguna.kernels.linear import TILE_HEIGHTS
from lean_laguna.kernels.moe import MAX_BANK, moe_experts, route
from lean_laguna.kernels.prepared_moe import TileExperts, TileRouter


@pytest.mark.parametrize("height", TILE_HEIGHTS)
@pytest.mark.parametrize(("experts", "top_k"), [(4, 1), (8, 2), (16, 6)])
@pytest.mark.parametrize("distinct", [1, 4, 16])
@pytest.mark.parametrize("norm_topk", [False, True])
def test_routed_experts_have_the_references_bits(height, experts, top_k, distinct, norm_topk, generator):
    gate_up = torch.randn(experts, 24, 40, generator=generator).transpose(1, 2)
    down = torch.randn(experts, 20, 24, generator=generator).transpose(1, 2)
    bias = 0.1 * torch.randn(experts, generator=generator)
    joint = torch.empty(height, 40 + experts)
    router = TileRouter(joint[:, 40:], bias, top_k, norm_topk)
    assert TileExperts.fits(gate_up, down, height)
    prepared = TileExperts(gate_up, down, router.by_expert)
    for _ in range(3):
        x = torch.randn(height, 24, generator=generator)
        joint.copy_(torch.randn(distinct, 40 + experts, generator=generator).repeat(height, 1)[:height])
        weights, expert_ids = route(joint[:, 40:], bias, top_k, norm_topk=norm_topk)
        used = router()
        assert used == sorted(set(expert_ids.flatten().tolist()))
        placed = torch.zeros(height, experts).scatter_(1, expert_ids, weights)
        assert torch.equal(router.by_expert.squeeze(-1).t(), placed)
        expected = moe_experts(x, gate_up, down, weights, expert_ids)
        assert torch.equal(prepared(x, used), expected)


def test_equal_scores_go_to_the_lower_expert():
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0], [2.0, 2.0, 0.0, 2.0]])
    router = TileRouter(logits, torch.zeros(4), 2, True)
    assert router() == [0, 1, 2]
    assert router.by_expert.squeeze(-1).t().tolist() == [[0, 0.5, 0.5, 0], [0.5, 0.5, 0, 0]]


def test_a_bank_beyond_what_torch_sums_in_order_does_not_fit():
    assert not TileExperts.fits(torch.empty(MAX_BANK + 1, 16, 8), torch.empty(MAX_BANK + 1, 8, 8), 2)
