import pytest
import torch
from tests.unit.kernels.test_attention import Span

from lean_laguna.kernels.attention import paged_attention
from lean_laguna.kernels.attention_plan import Tiles, plan_attention
from lean_laguna.kernels.elementwise import rms_norm, rms_scale_, rotate_, softplus
from lean_laguna.kernels.kv_mirror import KVMirror, TilePlan
from lean_laguna.kernels.linear import TILE_HEIGHTS, is_tiled, linear
from lean_laguna.kernels.prepared import TileAttention, TileLinear, TileNorm

HEADS, KV_HEADS, HEAD_DIM, ROTARY, PAGE = 6, 2, 8, 4, 16
TABLE = (5, 3, 8, 1, 2, 7, 6, 4)


@pytest.mark.parametrize("width", [7, 32, 256])
@pytest.mark.parametrize("height", TILE_HEIGHTS)
def test_norms_have_the_references_bits(width, height, generator):
    norm = TileNorm((height, width), 1e-6)
    for _ in range(2):
        x, weight = torch.randn(height, width, generator=generator), torch.rand(width, generator=generator)
        assert torch.equal(norm(x, weight), rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("shape", [(24, 16), (768, 256), (2048, 256)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("height", TILE_HEIGHTS)
def test_products_have_the_references_bits(shape, transposed, height, generator):
    weight = torch.randn(*shape, generator=generator)
    weight = weight.t().contiguous().t() if transposed else weight
    prepared = TileLinear(weight, height)
    assert is_tiled(weight, height) or not transposed
    for _ in range(2):
        x = torch.randn(height, shape[1], generator=generator)
        assert torch.equal(prepared(x), linear(x, weight))


@pytest.mark.parametrize("per_element", [False, True, None])
@pytest.mark.parametrize(
    ("first", "rows", "window", "height"),
    [(0, 1, None, 2), (100, 8, None, 8), (100, 3, 20, 4), (60, 5, 1, 8), (57, 16, 40, 16), (70, 1, 20, 16)],
)
def test_attention_has_the_references_bits(per_element, first, rows, window, height, generator):
    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    gates = 0 if per_element is None else HEADS * (HEAD_DIM if per_element else 1)
    joint = torch.randn(rows, width + gates, generator=generator)
    joint = torch.cat((joint, joint[-1:].expand(height - rows, -1)))
    q_weight, k_weight = torch.rand(2, HEAD_DIM, generator=generator)
    cos, signed_sin = torch.rand(2, height, 1, ROTARY, generator=generator)
    kv = torch.randn(9, PAGE, 2, KV_HEADS, HEAD_DIM, generator=generator)
    kv[0] = 0
    span = Span(0, rows, first, (TABLE,))

    expected = joint.clone()
    qk = expected[:, : (HEADS + KV_HEADS) * HEAD_DIM].view(height, HEADS + KV_HEADS, HEAD_DIM)
    rms_scale_(qk, 1e-6)
    qk[:, :HEADS].mul_(q_weight)
    qk[:, HEADS:].mul_(k_weight)
    rotate_(qk, cos, signed_sin)
    at = torch.arange(first, first + rows)
    slots = torch.tensor(TABLE)[at // PAGE] * PAGE + at % PAGE
    written = kv.clone()
    written.view(-1, 2 * KV_HEADS * HEAD_DIM)[slots] = expected[:rows, HEADS * HEAD_DIM : width]
    plan = plan_attention(Tiles([span]), 0, PAGE, KV_HEADS, HEAD_DIM, window)
    out = paged_attention(qk[:rows, :HEADS].contiguous(), written, plan, HEAD_DIM**-0.5)
    if gates:
        out.mul_(softplus(expected[:rows, width:]).view(rows, HEADS, -1))

    assert TileAttention.fits(height, HEADS, KV_HEADS, HEAD_DIM)
    prepared = TileAttention(joint, HEADS, KV_HEADS, HEAD_DIM, ROTARY, 1e-6)
    prepared.turn(q_weight, k_weight, cos, signed_sin.chunk(2, -1))
    assert torch.equal(joint, expected)
    assert torch.equal(prepared.own[rows], expected[:rows, HEADS * HEAD_DIM : width])
    tile, mirror = TilePlan.of(span, 0, PAGE, window, height), KVMirror(1, KV_HEADS, HEAD_DIM)
    mirror.prepare(tile, [kv], PAGE, 0)
    mirror.write(0, prepared.own_keys, prepared.own_values)
    found = prepared.attend(mirror.keys[0], mirror.values[0], tile.mask, tile.num_chunks)
    assert torch.equal(found.view(height, HEADS, HEAD_DIM)[:rows], out)


def test_buffers_made_under_inference_mode_serve_outside_it(generator):
    joint = torch.randn(2, (HEADS + 2 * KV_HEADS) * HEAD_DIM, generator=generator)
    prepared = TileAttention(joint, HEADS, KV_HEADS, HEAD_DIM, ROTARY, 1e-6)
    keys = torch.randn(KV_HEADS, HEAD_DIM, 64, generator=generator)
    values, mask = torch.randn(KV_HEADS, 64, HEAD_DIM, generator=generator), torch.zeros(2, 1, 1, 64)
    with torch.inference_mode():
        first = prepared.attend(keys, values, mask, 1).clone()
    assert torch.equal(prepared.attend(keys, values, mask, 1), first)
