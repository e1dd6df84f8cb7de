import pytest
import torch
from tests.unit.kernels.test_attention import Span
from torch.testing import assert_close

from lean_laguna.kernels import moe as moe_module
from lean_laguna.kernels.attention import paged_attention
from lean_laguna.kernels.attention_plan import Tiles, plan_attention
from lean_laguna.kernels.elementwise import rms_norm, rms_scale_, rotate_, softplus
from lean_laguna.kernels.linear import ROW_TILE, linear
from lean_laguna.kernels.moe import moe_experts, route
from lean_laguna.kernels.prepared import TileAttention, TileExperts, TileLinear, TileNorm, TileRouter

HEADS, KV_HEADS, HEAD_DIM, ROTARY, PAGE = 6, 2, 8, 4, 16


@pytest.mark.parametrize("width", [7, 32, 256])
def test_norms_have_the_references_bits(width, generator):
    norm = TileNorm((ROW_TILE, width), 1e-6)
    for _ in range(2):
        x, weight = torch.randn(ROW_TILE, width, generator=generator), torch.rand(width, generator=generator)
        assert torch.equal(norm(x, weight), rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("shape", [(24, 16), (768, 256), (2048, 256)])
@pytest.mark.parametrize("transposed", [False, True])
def test_products_have_the_references_bits(shape, transposed, generator):
    weight = torch.randn(*shape, generator=generator)
    weight = weight.t().contiguous().t() if transposed else weight
    prepared = TileLinear(weight)
    for _ in range(2):
        x = torch.randn(ROW_TILE, shape[1], generator=generator)
        assert torch.equal(prepared(x), linear(x, weight))


@pytest.mark.parametrize("per_element", [False, True, None])
@pytest.mark.parametrize(
    ("first", "rows", "window"), [(0, 1, None), (100, 8, None), (100, 3, 20), (60, 5, 1)]
)
def test_attention_has_the_references_bits(per_element, first, rows, window, generator):
    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    gates = 0 if per_element is None else HEADS * (HEAD_DIM if per_element else 1)
    joint = torch.randn(ROW_TILE, width + gates, generator=generator)
    q_weight, k_weight = torch.rand(2, HEAD_DIM, generator=generator)
    cos, signed_sin = torch.rand(2, ROW_TILE, 1, ROTARY, generator=generator)
    kv = torch.randn(9, PAGE, 2, KV_HEADS, HEAD_DIM, generator=generator)
    kv[0] = 0
    span = Span(0, rows, first, ((5, 3, 8, 1, 2, 7, 6),))
    plan = plan_attention(Tiles([span]), 0, PAGE, KV_HEADS, HEAD_DIM, window)

    expected = joint.clone()
    qk = expected[:, : (HEADS + KV_HEADS) * HEAD_DIM].view(ROW_TILE, HEADS + KV_HEADS, HEAD_DIM)
    rms_scale_(qk, 1e-6)
    qk[:, :HEADS].mul_(q_weight)
    qk[:, HEADS:].mul_(k_weight)
    rotate_(qk, cos, signed_sin)
    out = paged_attention(qk[:, :HEADS], kv, plan, HEAD_DIM**-0.5)
    if gates:
        out.mul_(softplus(expected[:, width:]).view(ROW_TILE, HEADS, -1))

    prepared = TileAttention(joint, HEADS, KV_HEADS, HEAD_DIM, ROTARY, 1e-6)
    prepared.turn(q_weight, k_weight, cos, signed_sin.chunk(2, -1))
    assert torch.equal(joint, expected)
    assert torch.equal(prepared.own[rows], expected[:rows, HEADS * HEAD_DIM : width])
    found = prepared.attend(kv.view(-1, HEAD_DIM), plan.batches[0])
    assert torch.equal(found.view(ROW_TILE, HEADS, HEAD_DIM), out)


def test_buffers_made_under_inference_mode_serve_outside_it(generator):
    joint = torch.randn(ROW_TILE, (HEADS + 2 * KV_HEADS) * HEAD_DIM, generator=generator)
    plan = plan_attention(Tiles([Span(0, 1, 4, ((1,),))]), 0, PAGE, KV_HEADS, HEAD_DIM, None)
    kv = torch.randn(2 * PAGE * 2 * KV_HEADS, HEAD_DIM, generator=generator)
    prepared = TileAttention(joint, HEADS, KV_HEADS, HEAD_DIM, ROTARY, 1e-6)
    with torch.inference_mode():
        first = prepared.attend(kv, plan.batches[0]).clone()
    assert torch.equal(prepared.attend(kv, plan.batches[0]), first)


@pytest.mark.parametrize(("experts", "top_k"), [(4, 1), (8, 2), (16, 6)])
@pytest.mark.parametrize("distinct", [1, 4, 16])
def test_experts_have_the_references_bits(experts, top_k, distinct, generator):
    gate_up = torch.randn(experts, 24, 40, generator=generator).transpose(1, 2)
    down = torch.randn(experts, 20, 24, generator=generator).transpose(1, 2)
    assert TileExperts.fits(gate_up, down, top_k)
    prepared = TileExperts(gate_up, down)
    for _ in range(3):
        x = torch.randn(ROW_TILE, 24, generator=generator)
        logits = torch.randn(distinct, experts, generator=generator).repeat(ROW_TILE, 1)[:ROW_TILE]
        weights, expert_ids = route(logits, torch.zeros(experts), top_k)
        expected = moe_experts(x, gate_up, down, weights, expert_ids)
        assert torch.equal(prepared(x, weights, expert_ids), expected)


def test_large_banks_and_many_choices_do_not_fit():
    small = torch.empty(4, 16, 8), torch.empty(4, 8, 8)
    assert not TileExperts.fits(*small, moe_module.FEW_EXPERTS + 1)
    assert not TileExperts.fits(torch.empty(17, 16, 8), torch.empty(17, 8, 8), 2)


@pytest.mark.parametrize("norm_topk", [False, True])
@pytest.mark.parametrize("experts", [7, 16])
def test_routes_have_the_references_bits(norm_topk, experts, generator):
    joint = torch.randn(ROW_TILE, 40 + experts, generator=generator)
    bias = 0.1 * torch.randn(experts, generator=generator)
    prepared = TileRouter(joint[:, 40:], bias, 3, norm_topk, 2.5)
    for _ in range(2):
        joint.normal_(generator=generator)
        weights, expert_ids = route(joint[:, 40:], bias, 3, norm_topk=norm_topk)
        found = prepared()
        assert torch.equal(found[1], expert_ids)
        assert_close(found[0], weights * 2.5, rtol=0, atol=0)
