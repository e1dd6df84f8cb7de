"""Packed weights give what their decoded selves give, bit for bit, in every product of a step."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; it comes with PyTorch's CUDA builds")

from lean_laguna.engine.gpu_packed import to_kernels
from lean_laguna.kernels.triton.expert_down import expert_down
from lean_laguna.kernels.triton.experts import Routing, expert_gate_up
from lean_laguna.kernels.triton.formats import decode
from lean_laguna.kernels.triton.head import write_logits
from lean_laguna.kernels.triton.launch import Launch, Tile
from lean_laguna.kernels.triton.projection import gate_up, project
from lean_laguna.quant.codec import encode, to_packed
from lean_laguna.quant.lane_order import reordered
from lean_laguna.quant.packed import bank, stack_rows
from lean_laguna.quant.scheme import (
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    INT8_CHANNEL,
    NVFP4,
    packed_integer,
)

EPS = 1e-6
TILE = Tile(16, 16, split=2, warps=2, stages=2)
SCHEMES = {
    "nvfp4": NVFP4,
    "fp8-tensor": dataclasses.replace(FP8_TENSOR, activations="none"),
    "fp8-channel": FP8_CHANNEL,
    "fp8-block": dataclasses.replace(FP8_BLOCK, block=(16, 16)),
    "int8": INT8_CHANNEL,
    "int8-groups": packed_integer(8, 16),
    "int4": packed_integer(4, None),
    "int4-groups": packed_integer(4, 16),
    "int4-asymmetric": packed_integer(4, 48, symmetric=False),
    "int8-wide": packed_integer(8, 48, symmetric=False),
}
EVERY = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
FEW = pytest.mark.parametrize("name", ["nvfp4", "fp8-block", "int4-asymmetric"])


@pytest.fixture
def dtype(device):
    """Every bit of a decoded value shows in float32; under the interpreter dots take no bfloat16."""
    return torch.bfloat16 if device == "cuda" else torch.float32


@pytest.fixture
def made(device):
    """A packed weight as loaded, of linears stacked where there are several heights."""

    def make(scheme, heights, columns, seed=0, scale=0.1):
        generator = torch.Generator().manual_seed(seed)
        parts = []
        for i, rows in enumerate(heights):
            weight = (torch.randn(rows, columns, generator=generator) * scale * (i + 1)).bfloat16()
            parts.append(to_packed(encode(weight, scheme), scheme, (rows, columns)))
        return (stack_rows(parts) if len(parts) > 1 else parts[0]).to(device)

    return make


@pytest.fixture
def both(dtype):
    """A packed weight for the kernels, and decoded."""
    return lambda weight: (to_kernels(weight, dtype), weight.decode(dtype))


@EVERY
@pytest.mark.parametrize(("rows", "columns"), [(37, 48), (16, 240)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_decoding_gives_the_weights_bits(made, both, poisoned, scheme, rows, columns, dtype):
    packed, plain = both(made(scheme, (rows, 24), columns))
    found = poisoned(plain.numel() + 5)
    assert torch.equal(decode(packed, found), plain)
    assert found[plain.numel() :].isnan().all()


@pytest.mark.parametrize("bits", [4, 8])
def test_odd_columns_end_in_half_a_byte(made, both, poisoned, bits):
    packed, plain = both(made(packed_integer(bits, None), (20,), 33))
    assert torch.equal(decode(packed, poisoned(plain.numel())), plain)


def test_reordered_columns_keep_their_groups(made, both, poisoned):
    weight = made(packed_integer(4, 16, symmetric=False), (20,), 48)
    order = torch.randperm(48, device=weight.codes.device)
    groups = (torch.arange(48, device=order.device) // 16)[order].int()
    packed, plain = both(dataclasses.replace(weight, column_groups=groups))
    assert torch.equal(decode(packed, poisoned(plain.numel())), plain)


@pytest.mark.parametrize("byte", [0x00, 0x01, 0x07, 0x08, 0x7E, 0x80, 0x83, 0xFE])
def test_every_kind_of_e4m3_is_decoded(both, made, poisoned, byte):
    weight = made(FP8_CHANNEL, (16,), 32)
    weight.codes.view(torch.uint8).fill_(byte)
    packed, plain = both(weight)
    assert torch.equal(decode(packed, poisoned(plain.numel())), plain)


@EVERY
@pytest.mark.parametrize("split", [1, 2])
def test_a_projection_has_the_bits_of_the_decoded_weight(
    made, both, draw, poisoned, count, assert_same_bits, scheme, split
):
    packed, plain = both(made(scheme, (33, 8), 240))
    x, norm, tile = draw(16, 240), draw(240) + 1, Tile(16, 16, split=split, warps=split, stages=2)
    outs = poisoned(16, 41), poisoned(16, 41)
    for weight, out in zip((packed, plain), outs, strict=True):
        project(x, weight, out, count(5), tile, Launch(cols=8), norm=norm, eps=EPS)
    assert_same_bits(outs[0][:5], outs[1][:5])
    assert outs[0][5:].isnan().all()


@EVERY
def test_a_packed_shared_expert_stands_beside_a_plain_router(
    made, both, draw, poisoned, count, assert_same_bits, scheme
):
    experts, width, k, rows = 10, 24, 48, 5
    packed, plain = both(made(scheme, (width, width), k))
    router, x, norm = draw(experts, k, scale=0.2), draw(16, k), draw(k) + 1
    found = [(poisoned(16, width), poisoned(16, experts), poisoned(16, k)) for _ in range(2)]
    for (act, scores, normed), apart in zip(found, (True, False), strict=True):
        weight, extra = (router, {"shared": packed}) if apart else (torch.cat([router, plain]), {})
        own = {"scores": scores, "normed": normed, **extra}
        gate_up(x, norm, weight, act, count(rows), EPS, TILE, Launch(cols=8), **own)
    for a, b in zip(*found, strict=True):
        assert_same_bits(a[:rows], b[:rows])
        assert a[rows:].isnan().all()


@FEW
def test_a_packed_dense_mlp_needs_no_router(made, both, draw, poisoned, count, assert_same_bits, name):
    packed, plain = both(made(SCHEMES[name], (20, 20), 48))
    x, norm, acts = draw(16, 48), draw(48) + 1, (poisoned(16, 20), poisoned(16, 20))
    for weight, act in zip((packed, plain), acts, strict=True):
        gate_up(x, norm, weight, act, count(3), EPS, TILE, Launch(cols=8))
    assert_same_bits(acts[0][:3], acts[1][:3])


@EVERY
def test_packed_experts_have_the_bits_of_the_decoded_bank(
    made, both, draw, poisoned, count, device, assert_same_bits, scheme
):
    experts, width, hidden, top_k, rows = 6, 48, 48, 2, 4
    up = bank([made(scheme, (width, width), hidden, seed=i) for i in range(experts)])
    down = bank([made(scheme, (hidden,), width, seed=i + 50) for i in range(experts)])
    shared = made(scheme, (hidden,), 96, seed=99)
    x, scores, residual, act = draw(16, hidden), draw(16, experts), draw(16, hidden), draw(16, 96)
    bias, found = draw(experts, of=torch.float32), []
    for which in (0, 1):
        routing = Routing(
            act=poisoned(experts, 16, width),
            slot_weights=poisoned(experts, 16, of=torch.float32),
            slot_experts=torch.full((experts,), -1, dtype=torch.int32, device=device),
            num_slots=torch.full((1,), -1, dtype=torch.int32, device=device),
            expert_ids=torch.full((16, top_k), -1, dtype=torch.int32, device=device),
        )
        out, launch = residual.clone(), Launch(programs=2)
        own = [both(weight)[which] for weight in (up, down, shared)]
        expert_gate_up(x, scores, bias, own[0], routing, count(rows), TILE, launch, top_k=top_k)
        last = {"scaling": 2.5, "shared_act": act, "shared_weight": own[2]}
        expert_down(routing, own[1], out, count(rows), TILE, launch, **last)
        found.append(out)
    assert_same_bits(*found)
    assert not found[0].isnan().any()
    assert torch.equal(found[0][rows:], residual[rows:])


@FEW
def test_a_packed_head_has_the_bits_of_the_decoded_one(made, both, draw, poisoned, count, name):
    packed, plain = both(made(SCHEMES[name], (83,), 48))
    x, found = draw(16, 48), [poisoned(16, 83, of=torch.float32) for _ in range(2)]
    for weight, logits in zip((packed, plain), found, strict=True):
        write_logits(x, weight, logits, count(3), Tile(16, 16, warps=1, stages=2), Launch())
    assert torch.equal(found[0][:3], found[1][:3])
    assert found[0][3:].isnan().all()


@FEW
def test_a_row_has_the_same_bits_for_every_number_of_rows_slot_and_neighbour(
    made, both, draw, poisoned, count, assert_same_bits, name
):
    weight = both(made(SCHEMES[name], (48,), 96))[0]
    norm, row, alone = draw(96) + 1, draw(96), poisoned(16, 48)
    project(row.expand(16, 96).contiguous(), weight, alone, count(1), TILE, Launch(), norm=norm, eps=EPS)
    for rows in (1, 2, 5, 8, 16):
        x, out = draw(16, 96, scale=30.0), poisoned(16, 48)
        x[rows - 1] = row
        project(x, weight, out, count(rows), TILE, Launch(), norm=norm, eps=EPS)
        assert_same_bits(out[rows - 1], alone[0])


@pytest.mark.parametrize(
    ("name", "order"),
    [
        *((name, order) for name in ("nvfp4", "int4-groups") for order in ("lanes", "pairs")),
        *((name, "lanes") for name in ("fp8-channel", "int8-groups")),
        ("fp8-channel", "bytes"),
    ],
)
@pytest.mark.parametrize("split", [1, 4])
def test_codes_in_the_order_of_lanes_give_the_same_weights(
    made, both, draw, poisoned, count, name, order, split
):
    weight = made(SCHEMES[name], (16, 32), 1024)
    packed, plain = both(weight)
    codes = reordered(packed.codes, SCHEMES[name].kind, order)
    packed = dataclasses.replace(packed, codes=codes, order=order)
    assert torch.equal(decode(packed, poisoned(plain.numel())), plain)
    x, outs = draw(16, 1024), (poisoned(16, 48), poisoned(16, 48))
    for own, out in zip((packed, plain), outs, strict=True):
        project(x, own, out, count(3), Tile(16, 64, split=split, warps=split, stages=2), Launch(cols=8))
    assert torch.equal(outs[0][:3], outs[1][:3])
