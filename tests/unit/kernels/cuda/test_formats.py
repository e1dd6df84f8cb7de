"""CUDA C++ products of packed weights: FP8 and integers have the decoded weights' bits, NVFP4 is as exact."""

import pytest
import torch

from lean_laguna.engine.gpu_packed import in_lane_order, to_kernels
from lean_laguna.kernels.cuda import products
from lean_laguna.kernels.triton.experts import Routing
from lean_laguna.kernels.triton.launch import MAX_ROWS, Launch
from lean_laguna.kernels.triton.weights import SparseWeights
from lean_laguna.quant.random_weight import random_weight
from lean_laguna.quant.scheme import FP8_BLOCK, FP8_CHANNEL, NVFP4, packed_integer

EPS = 1e-6
SCHEMES = {
    "nvfp4": NVFP4,
    "fp8-block": FP8_BLOCK,
    "fp8-channel": FP8_CHANNEL,
    "int8": packed_integer(8, 128),
    "int4": packed_integer(4, 128),
}
EVERY = pytest.mark.parametrize("name", SCHEMES)


@pytest.fixture
def both(device):
    """A packed weight in lane order, and decoded."""

    def make(name, *shape, heights=None, pairs=False, seed=0):
        generator = torch.Generator(device).manual_seed(seed)
        stored = random_weight(SCHEMES[name], shape, heights or (shape[-2],), 0.03, generator)
        plain = stored.decode(torch.bfloat16)
        return to_kernels(in_lane_order(stored, pairs=pairs), torch.bfloat16), plain

    return make


def agree(name, found, expected):
    if name == "nvfp4":
        torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
    else:
        assert torch.equal(found, expected)


def rows_of(draw, poisoned, n, width):
    x = poisoned(MAX_ROWS, width)
    x[:n] = draw(n, width)
    return x


@EVERY
@pytest.mark.parametrize(("gated", "live", "cols"), [(False, 1, 1), (False, 2, 8), (True, 11, 16)])
def test_project(draw, poisoned, count, both, name, gated, live, cols):
    k, n = 1024, 40
    weights = both(name, 2 * n, k, heights=(n, n))
    x, norm = rows_of(draw, poisoned, live, k), draw(k, scale=0.2) + 1
    outs = [poisoned(MAX_ROWS, n if gated else 2 * n) for _ in weights]
    for weight, out in zip(weights, outs, strict=True):
        assert products.fits_project(weight, gated=gated)
        products.project(x, norm, weight, out, count(live), EPS, Launch(cols), gated=gated)
    agree(name, outs[0][:live], outs[1][:live])
    assert outs[0][live:].isnan().all()


@EVERY
@pytest.mark.parametrize(("k", "live", "cols"), [(512, 3, 8), (2048, 12, 16)])
def test_project_add(draw, poisoned, count, both, name, k, live, cols):
    weights, x = both(name, 32, k, pairs=True), rows_of(draw, poisoned, live, k)
    old, found = rows_of(draw, poisoned, live, 32), []
    for weight in weights:
        assert products.fits_project_add(weight)
        hidden = old.clone()
        products.project_add(x, weight, hidden, count(live), Launch(cols))
        found.append(hidden[:live])
    agree(name, *found)


@EVERY
@pytest.mark.parametrize(("live", "cols"), [(1, 1), (2, 8), (9, 16)])
def test_experts(draw, poisoned, count, device, both, name, live, cols):
    experts, d, f, top_k = 32, 1024, 512, 3
    up, down = both(name, experts, 2 * f, d, heights=(f, f)), both(name, experts, d, f, pairs=True, seed=1)
    shared = both(name, 2 * f, d, heights=(f, f), seed=2)
    last, router = both(name, d, f, pairs=True, seed=3), draw(experts, d, scale=0.05)
    own = {"norm": draw(d, scale=0.2) + 1, "bias": draw(experts, scale=0.3, of=torch.float32), "top_k": top_k}
    blocks = (
        SparseWeights(
            router_gate_up=router,
            shared_gate_up=shared[0],
            gate_up=up[0],
            down=down[0],
            shared_down=last[0],
            scaling=1.5,
            **own,
        ),
        SparseWeights(
            router_gate_up=torch.cat([router, shared[1]]),
            gate_up=up[1],
            down=down[1],
            shared_down=last[1],
            scaling=1.5,
            **own,
        ),
    )
    old, found = rows_of(draw, poisoned, live, d), []
    for block in blocks:
        assert products.fits_experts(block)
        slots, hidden = min(experts, MAX_ROWS * top_k), old.clone()
        routing = Routing(
            act=poisoned(slots, MAX_ROWS, f),
            slot_weights=poisoned(slots, MAX_ROWS, of=torch.float32),
            slot_experts=torch.zeros(slots, dtype=torch.int32, device=device),
            num_slots=torch.zeros(1, dtype=torch.int32, device=device),
            expert_ids=torch.full((MAX_ROWS, top_k), -1, dtype=torch.int32, device=device),
        )
        buffers = (poisoned(MAX_ROWS, experts), poisoned(MAX_ROWS, d), poisoned(MAX_ROWS, f), routing)
        tables = torch.zeros(products.TABLE_BYTES, dtype=torch.uint8, device=device)
        products.run_experts(block, hidden, *buffers, tables, count(live), EPS, Launch(cols))
        found.append(hidden[:live])
    agree(name, *found)
    assert not found[0].isnan().any()


def test_what_does_not_fit_is_left_to_triton(both):
    packed, _ = both("nvfp4", 16, 1024)
    assert not products.fits_project_add(packed)  # codes lie by rows of lanes, not by pairs
    assert not products.fits_project(both("nvfp4", 16, 512)[0])
    assert not products.fits_project(both("int4", 16, 1024, pairs=True)[0])
