"""CUDA C++ products of packed weights: as those of the decoded ones, and a row's bits are its own."""

from types import SimpleNamespace

import pytest
import torch

from lean_laguna.engine.gpu_packed import in_lane_order, to_kernels
from lean_laguna.kernels.cuda import packed_products, products
from lean_laguna.kernels.cuda.layers import CudaLayers
from lean_laguna.kernels.triton.experts import Routing
from lean_laguna.kernels.triton.formats import Packed
from lean_laguna.kernels.triton.launch import MAX_ROWS, Launch
from lean_laguna.kernels.triton.weights import SparseWeights
from lean_laguna.models.shapes import laguna_shape
from lean_laguna.quant.random_weight import random_weight
from lean_laguna.quant.scheme import FP8_BLOCK, FP8_CHANNEL, NVFP4, packed_integer
from support import kernel_twins as plain

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
        decoded = stored.decode(torch.bfloat16)
        return to_kernels(in_lane_order(stored, pairs=pairs), torch.bfloat16), decoded

    return make


def agree(found, expected):
    assert not found.isnan().any()
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


def rows_of(draw, poisoned, n, width):
    x = poisoned(MAX_ROWS, width)
    x[:n] = draw(n, width)
    return x


@EVERY
@pytest.mark.parametrize(
    ("gated", "live", "cols"), [(False, 1, 1), (True, 1, 1), (False, 2, 8), (True, 11, 16)]
)
def test_project(draw, poisoned, count, both, name, gated, live, cols):
    k, n = 1024, 40
    weight, decoded = both(name, 2 * n, k, heights=(n, n))
    x, norm = rows_of(draw, poisoned, live, k), draw(k, scale=0.2) + 1
    out = poisoned(MAX_ROWS, n if gated else 2 * n)
    assert products.fits_project(weight, gated=gated)
    products.project(x, norm, weight, out, count(live), EPS, Launch(cols), gated=gated)
    expected = plain.linear(plain.rms_norm(x[:live], norm, EPS), decoded)
    agree(out[:live], plain.silu_and_mul(expected) if gated else expected)
    assert out[live:].isnan().all()


@EVERY
@pytest.mark.parametrize(("k", "live", "cols"), [(512, 3, 8), (2048, 12, 16)])
def test_project_add(draw, poisoned, count, both, name, k, live, cols):
    (weight, decoded), x = both(name, 32, k, pairs=True), rows_of(draw, poisoned, live, k)
    hidden = rows_of(draw, poisoned, live, 32)
    expected = hidden[:live] + plain.linear(x[:live], decoded)
    assert products.fits_project_add(weight)
    products.project_add(x, weight, hidden, count(live), Launch(cols))
    agree(hidden[:live], expected)
    assert hidden[live:].isnan().all()


EXPERTS, WIDTH, TOP_K = 32, 512, 3


@pytest.fixture
def blocks(draw, both):
    """A MoE block with packed weights, and one with the same decoded."""

    def make(name, d=1024):
        up = both(name, EXPERTS, 2 * WIDTH, d, heights=(WIDTH, WIDTH))
        down = both(name, EXPERTS, d, WIDTH, pairs=True, seed=1)
        shared = both(name, 2 * WIDTH, d, heights=(WIDTH, WIDTH), seed=2)
        last, router = both(name, d, WIDTH, pairs=True, seed=3), draw(EXPERTS, d, scale=0.05)
        bias = draw(EXPERTS, scale=0.3, of=torch.float32)
        own = {"norm": draw(d, scale=0.2) + 1, "bias": bias, "top_k": TOP_K, "scaling": 1.5}
        routers = ((router, shared[0]), (torch.cat([router, shared[1]]), None))
        return [
            SparseWeights(
                router_gate_up=routers[i][0],
                shared_gate_up=routers[i][1],
                gate_up=up[i],
                down=down[i],
                shared_down=last[i],
                **own,
            )
            for i in range(2)
        ]

    return make


@pytest.fixture
def run(poisoned, count, device):
    """Run a MoE block on live rows of a residual stream; returns what they become."""

    def experts(block, hidden, live, cols):
        assert products.fits_experts(block)
        slots, d = min(EXPERTS, MAX_ROWS * TOP_K), hidden.shape[1]
        routing = Routing(
            act=poisoned(slots, MAX_ROWS, WIDTH),
            slot_weights=poisoned(slots, MAX_ROWS, of=torch.float32),
            slot_experts=torch.zeros(slots, dtype=torch.int32, device=device),
            num_slots=torch.zeros(1, dtype=torch.int32, device=device),
            expert_ids=torch.full((MAX_ROWS, TOP_K), -1, dtype=torch.int32, device=device),
        )
        buffers = (poisoned(MAX_ROWS, EXPERTS), poisoned(MAX_ROWS, d), poisoned(MAX_ROWS, WIDTH), routing)
        out = hidden.clone()
        products.run_experts(block, out, *buffers, count(live), EPS, Launch(cols))
        return out[:live]

    return experts


def experts_of(block, hidden):
    """Compute the same in plain PyTorch, with plain weights."""
    x = plain.rms_norm(hidden, block.norm, EPS)
    weights, ids = plain.route(plain.linear(x, block.router_gate_up[:EXPERTS]), block.bias, TOP_K)
    routed = plain.moe(x, block.gate_up, block.down, weights, ids).to(x.dtype) * block.scaling
    shared = plain.silu_and_mul(plain.linear(x, block.router_gate_up[EXPERTS:]))
    return hidden + (routed + plain.linear(shared, block.shared_down))


WIDTHS = ((1, 1), (2, 8), (9, 16))
# How a format is read does not hang on the width: test_project has all pairs of the two. The others are slow.
QUICK = {*(("nvfp4", cols) for _, cols in WIDTHS), ("fp8-block", 8), ("fp8-block", 16)}
QUICK |= {("fp8-channel", 1), ("int8", 8), ("int4", 16)}


@pytest.mark.parametrize(
    ("name", "live", "cols"),
    [
        pytest.param(name, *width, marks=[] if (name, width[1]) in QUICK else pytest.mark.slow)
        for name in SCHEMES
        for width in WIDTHS
    ],
)
def test_experts(draw, poisoned, blocks, run, name, live, cols):
    old = rows_of(draw, poisoned, live, 1024)
    packed, decoded = blocks(name)
    agree(run(packed, old, live, cols), experts_of(decoded, old[:live]))


@pytest.mark.parametrize("name", ["nvfp4", "fp8-block"])
def test_a_row_has_the_same_bits_at_every_width(draw, poisoned, count, both, blocks, run, name):
    qkv, out, block = both(name, 32, 1024)[0], both(name, 32, 512, pairs=True)[0], blocks(name)[0]
    x, norm = draw(MAX_ROWS, 1024), draw(1024, scale=0.2) + 1
    found = []
    for live, cols in ((1, 1), (3, 8), (10, 16)):
        first, second = poisoned(MAX_ROWS, 32), x[:, 512:544].clone()
        products.project(x, norm, qkv, first, count(live), EPS, Launch(cols))
        products.project_add(x[:, :512], out, second, count(live), Launch(cols))
        found.append(torch.cat([first[0], second[0], run(block, x, live, cols)[0]]))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("name", ["nvfp4", pytest.param("fp8-block", marks=pytest.mark.slow)])
def test_a_lone_row_has_the_same_bits_however_many_share_its_units(draw, blocks, run, monkeypatch, name):
    block, x, found = blocks(name)[0], draw(MAX_ROWS, 1024), []
    for num in (2, 33):  # the sums of few units are kept to the end
        monkeypatch.setattr(packed_products, "multiprocessors", lambda _, num=num: num)
        found.append(run(block, x, 1, 1))
    assert torch.equal(*found)


@pytest.mark.parametrize("rows", [144, 160])
def test_a_lone_row_has_the_same_bits_however_many_blocks_have_places(
    draw, poisoned, count, both, monkeypatch, rows
):
    weight, k = both("fp8-block", rows, 2048)[0], 2048
    x, norm, found = draw(MAX_ROWS, k), draw(k, scale=0.2) + 1, []
    monkeypatch.setattr(packed_products, "multiprocessors", lambda _: 2)  # a team has four or five blocks
    for cols, room in ((8, 50), (1, 34), (1, 50), (1, 100)):
        monkeypatch.setattr(packed_products, "LONE_ROOM", room << 10)
        out = poisoned(MAX_ROWS, rows)
        products.project(x, norm, weight, out, count(1), EPS, Launch(cols), gated=False)
        found.append(out[0])
    assert all(torch.equal(row, found[0]) for row in found)


@pytest.mark.parametrize("name", ["nvfp4", "fp8-block", "fp8-channel", "int8"])
def test_rows_normalised_already_are_taken_as_they_are(draw, poisoned, count, both, monkeypatch, name):
    (weight, decoded), x, found = both(name, 352, 1024), draw(MAX_ROWS, 1024), []
    monkeypatch.setattr(packed_products, "multiprocessors", lambda _: 2)  # more blocks than sums are kept of
    for live, cols in ((1, 1), (3, 8), (10, 16)):
        out = poisoned(MAX_ROWS, 352)
        packed_products.project(x, None, weight, out, count(live), EPS, Launch(cols), gated=False)
        assert out[live:].isnan().all()
        found.append(out[:live])
    assert torch.equal(found[1], found[2][:3])
    assert torch.equal(found[0], found[1][:1])
    expected = x[:10].double() @ decoded.double().T
    assert (found[2].double() - expected).norm() < 5e-3 * expected.norm()


def test_a_packed_head_is_multiplied_here_and_a_plain_one_is_not(draw, count, both, device):
    (weight, decoded), x = both("fp8-block", 352, 1024), draw(MAX_ROWS, 1024)
    layers = CudaLayers(torch.device(device))
    assert layers.head(decoded, 16) is None
    assert layers.head(weight, 64) is None  # wider than its kernels
    found = layers.head(weight, 16)(x, count(5), Launch(8))
    expected = x[:5].double() @ decoded.double().T
    assert found.shape == (16, 352)
    assert (found[:5].double() - expected).norm() < 5e-3 * expected.norm()


def test_what_does_not_fit_is_left_to_triton(both):
    packed, _ = both("nvfp4", 16, 1024)
    assert not products.fits_project_add(packed)  # codes lie by rows of lanes, not by pairs
    assert not products.fits_project(both("nvfp4", 16, 512)[0])
    assert not products.fits_project(both("int4", 16, 1024, pairs=True)[0])
    assert not products.fits_project(both("fp8-block", 16, 1536)[0], gated=False)
    assert products.fits_project(both("fp8-block", 16, 512)[0], gated=False)


@pytest.fixture
def launched(monkeypatch):
    """What would be launched on 132 multiprocessors: bytes of shared memory."""
    found = []
    monkeypatch.setattr(packed_products, "launch_kernel", lambda *call: found.append(call[3]))
    monkeypatch.setattr(packed_products, "multiprocessors", lambda _: 132)
    monkeypatch.setattr(packed_products, "takes_packed", lambda _: True)
    for name in ("scale_words", "unit_factors", "pair_factors", "expert_factors"):
        monkeypatch.setattr(packed_products, name, lambda *_, **__: None)
    return found


def on_meta(name, *size, pairs=False):
    """A packed weight without memory."""
    kind, (n, k) = name.split("-")[0].removeprefix("nv"), size[-2:]
    tall, wide = {"nvfp4": (1, 16), "fp8-block": (128, 128), "fp8-channel": (1, k)}.get(name, (1, 128))
    small = kind in ("fp4", "int4")
    codes = torch.empty((*size[:-1], k // 2 if small else k), dtype=torch.uint8, device="meta")
    of = torch.uint8 if kind == "fp4" else torch.bfloat16
    scales = torch.empty((*size[:-2], -(-n // tall), k // wide), dtype=of, device="meta")
    order = ("pairs" if pairs else "lanes") if small else "bytes" if kind == "fp8" and not pairs else "lanes"
    return Packed(kind, size, torch.bfloat16, codes, scales, tall, wide, order=order)


@EVERY
@pytest.mark.parametrize("shape", ["laguna-xs-2.1", "laguna-s-2.1"])
@pytest.mark.parametrize("cols", [1, 8, 16])
def test_what_fits_stays_within_the_cards_shared_memory(launched, name, shape, cols):
    config, launch = laguna_shape(shape), Launch(cols)
    d, f, dense = config.hidden_size, config.moe_intermediate_size, config.intermediate_size
    experts, top_k = config.num_experts, config.num_experts_per_tok
    x = torch.empty(16, d, dtype=torch.bfloat16, device="meta")
    adds = [on_meta(name, d, dense, pairs=True)]
    for heads in set(config.num_attention_heads_per_layer):
        adds.append(on_meta(name, d, heads * config.head_dim, pairs=True))
        qkv = on_meta(name, (heads + 16) * config.head_dim + 128, d)
        packed_products.project(x, x, qkv, x, x, EPS, launch, gated=False)
    packed_products.project(x, x, on_meta(name, 2 * dense, d), x, x, EPS, launch, gated=True)
    for weight in filter(packed_products.fits_project_add, adds):
        packed_products.project_add(x, weight, x, x, launch, None)
    block = SparseWeights(
        norm=x,
        router_gate_up=x,
        shared_gate_up=on_meta(name, 2 * f, d),
        bias=x,
        gate_up=on_meta(name, experts, 2 * f, d),
        down=on_meta(name, experts, d, f, pairs=True),
        shared_down=on_meta(name, d, f, pairs=True),
        top_k=top_k,
        scaling=1.0,
    )
    assert packed_products.fits_experts(block) == (shape == "laguna-xs-2.1")
    if packed_products.fits_experts(block):
        packed_products.run_experts(block, x, x, x, x, SimpleNamespace(act=x, expert_ids=x), x, launch, None)
    assert len(launched) >= 5
    assert max(launched) <= 227 << 10
