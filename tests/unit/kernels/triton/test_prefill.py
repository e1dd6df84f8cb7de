"""Prefill equals the plain model chunk by chunk, decode goes on from it, and a chunk's bits are its own."""

import copy
import dataclasses
import math
import sys

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; it comes with PyTorch's CUDA builds")

from tests.support.targets import PagedRun, laguna_json, random_ids, random_target

from lean_laguna.core.model_config import LagunaConfig
from lean_laguna.engine.gpu_weights import target_weights
from lean_laguna.kernels.triton import prefill, prefill_scratch
from lean_laguna.kernels.triton.launch import Launch, Tile
from lean_laguna.kernels.triton.prefill import PrefillStep
from lean_laguna.kernels.triton.prefill_scratch import PrefillScratch
from lean_laguna.kernels.triton.prefill_tiles import AttentionTile, ExpertTile, PrefillTiles
from lean_laguna.kernels.triton.step import Caches, Inputs, Scratch, TargetStep
from lean_laguna.kernels.triton.tiles import Tiles

CHUNK, LENGTH, PAGE = 16, 37, 4
SHORT = 21
SMALL = AttentionTile(16, 16, 4, 2)
EXPERTS = ExpertTile(32, 16, 32, 16, 4, 4, 2, 2, halves=True)
TILES = PrefillTiles(full=SMALL, sliding=SMALL, experts=EXPERTS)
TAPS = (0, 2)
FULL, SLIDING = "full_attention", "sliding_attention"


class Scene:
    """A random target as modules and as kernel weights, with pages and buffers full of NaN."""

    def __init__(self, dtype, device, **changes):
        self.dtype, self.device = dtype, device
        layers = {
            "num_hidden_layers": 3,
            "num_attention_heads_per_layer": [4, 6, 4],
            "layer_types": [FULL, SLIDING, FULL],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "head_dim": 16,
        }
        given = laguna_json(**(layers | changes))
        self.target = random_target(LagunaConfig.from_dict(given)).to(dtype).float()
        self.weights = target_weights(copy.deepcopy(self.target).to(device, dtype), 512)
        self.ids = random_ids(LENGTH, 3)

    def step(self, seed=0, garbage=float("nan"), rows=CHUNK):
        """Fresh pages, in an order of their own, and fresh buffers for chunks of so many rows."""
        config, blocks = self.target.config, -(-LENGTH // PAGE) + 5
        generator = torch.Generator().manual_seed(seed)
        size = (blocks + 1, PAGE, config.num_key_value_heads, config.head_dim)

        def filled(*shape, value=float("nan")):
            return torch.full(shape, value, dtype=self.dtype, device=self.device)

        tables = []
        for kind in (FULL, SLIDING):
            table = torch.zeros(16, blocks, dtype=torch.int32)
            table[1] = torch.randperm(blocks, generator=generator) + 1
            tables.append((kind, table.to(self.device)))
        pages = tuple((filled(*size), filled(*size)) for _ in config.layer_types)
        caches = Caches(pages, tuple(dict(tables)[kind] for kind in config.layer_types))
        scratch = PrefillScratch.allocate(self.weights, rows, block=CHUNK)
        for buffer in (scratch.hidden, scratch.normed, scratch.room):
            buffer.fill_(garbage)
        taps = filled(rows, len(TAPS), config.hidden_size)
        return PrefillStep(self.weights, caches, scratch, TAPS, taps, tiles=TILES)

    def feed(self, step, end=LENGTH, start=0):
        """Run the chunks of a prompt; return hidden states and taps of every token."""
        hidden, taps, at = [], [], start
        while at < end:
            n = min(step.scratch.rows, end - at)
            step.scratch.input_ids[:n] = self.ids[at : at + n].to(self.device)
            hidden.append(step.run(step.scratch.input_ids, at, n, 1, all_rows=True).clone())
            taps.append(step.taps[:n].clone())
            at += n
        return torch.cat(hidden), torch.cat(taps)

    def keys(self, step, length=LENGTH):
        """Keys and values by layer and position."""
        at = torch.arange(length, device=self.device)
        caches = step.caches
        return [
            tuple(pages[table[1, at // PAGE].long(), at % PAGE] for pages in layer)
            for layer, table in zip(caches.layers, caches.tables, strict=True)
        ]


def assert_near(found, expected, dtype):
    """Rows agree; in half precision a close call of the router may send a few of them elsewhere."""
    found, expected = found.float().cpu().flatten(1), expected.float().flatten(1)
    error = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert not error.isnan().any()
    bound = {torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
    share = 1.0 if dtype == torch.float32 else 0.75
    assert error.quantile(share) < bound


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    """The last block of a prompt is of fewer rows than the others, where it has few tokens."""
    monkeypatch.setattr(prefill_scratch, "MIN_ROWS", CHUNK // 2)


@pytest.fixture
def half(device):
    """What the GPU computes in; the interpreter knows no bfloat16 products."""
    return torch.bfloat16 if device == "cuda" else torch.float16


VARIANTS = {
    "no gate, odd experts": {
        "gating": False,
        "num_experts": 11,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
    },
    "softcap, wide window": {
        "moe_router_logit_softcapping": 0.5,
        "norm_topk_prob": False,
        "hidden_size": 48,
        "sliding_window": 21,
    },
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (i > 0)) for i, name in enumerate(VARIANTS)]
)
def test_prefill_equals_the_model(device, half, name):
    dtype, changes = half if name.startswith("softcap") else torch.float32, VARIANTS[name]
    if device == "cuda":
        # Float32 products would be TF32 there.
        dtype = half
    scene = Scene(dtype, device, **changes)
    step = scene.step()
    hidden, taps = scene.feed(step)
    run = PagedRun(scene.target, [LENGTH])
    logits, expected_taps = run.step([(0, scene.ids)], TAPS)[0]
    assert_near(hidden.float() @ scene.weights.head.float().T, logits, dtype)
    assert_near(taps, expected_taps, dtype)
    places = scene.target._place
    for i, found in enumerate(scene.keys(step)):
        group, layer = places[i]
        storage = run.cache.storage(group, layer)
        pages = storage[list(run.tables[0][group])].flatten(0, 1)[:LENGTH]
        for which in (0, 1):
            assert_near(found[which], pages[:, which], dtype)


def test_a_chunks_bits_depend_on_nothing_but_its_tokens_and_keys(half, device, assert_same_bits):
    scene = Scene(half, device)
    step = scene.step()
    hidden, taps = scene.feed(step, SHORT)
    other = scene.step(seed=5, garbage=3.0)
    # The last chunk alone, its prefix taken from elsewhere, in other pages and over other leftovers.
    start = CHUNK
    at = torch.arange(start, device=device)
    for i, layer in enumerate(scene.keys(step, start)):
        own = other.caches.tables[i][1]
        window = scene.weights.layers[i].attention.shape.window
        seen = at if not window else at[max(0, start - window + 1) :]
        for pages, kept in zip(other.caches.layers[i], layer, strict=True):
            pages[own[seen // PAGE].long(), seen % PAGE] = kept[seen]
    alone, alone_taps = scene.feed(other, SHORT, start)
    assert_same_bits(alone, hidden[start:])
    assert_same_bits(alone_taps, taps[start:])
    for mine, theirs in zip(scene.keys(other, SHORT), scene.keys(step, SHORT), strict=True):
        for which in (0, 1):
            assert_same_bits(mine[which][start:], theirs[which][start:])


@pytest.mark.parametrize("far", [4096, 20])
def test_launches_of_a_block_are_the_same_wherever_it_lies(half, device, assert_same_bits, monkeypatch, far):
    monkeypatch.setattr(prefill, "FAR", far)
    scene = Scene(half, device)
    expected, step = scene.step(), scene.step(seed=4)
    hidden = scene.feed(expected)[0]
    tables = tuple(table[1] for table in step.caches.tables)
    for at in range(0, LENGTH, CHUNK):
        n, rows = min(CHUNK, LENGTH - at), CHUNK if at + CHUNK <= LENGTH else CHUNK // 2
        step.scratch.input_ids[:n] = scene.ids[at : at + n].to(device)
        step.scratch.note(at, n)
        (span,) = [s for s in step.spans(rows) if s[0] <= at <= s[1]]
        step.launch(step.scratch.input_ids, span[2], rows, tables)
        assert_same_bits(step.found(n, all_rows=True), hidden[at : at + n])


def test_every_position_of_a_short_block_has_its_launches(half, device, monkeypatch):
    monkeypatch.setattr(prefill, "FAR", 20)
    step = Scene(half, device).step()
    room, most = step.scratch.keys[0].shape[0] - prefill.ORDERED_SLACK, 512  # rows of the rotary tables
    assert step.spans(CHUNK) == [(0, room - CHUNK, room - CHUNK)]
    rows = CHUNK // 2
    spans = step.spans(rows)
    assert [span[:2] for span in spans] == [(0, 19), (20, room - rows), (room - rows + 1, math.inf)]
    assert [span[2] for span in spans] == [0, room - rows, most]
    monkeypatch.setattr(prefill, "FAR", 4096)
    assert step.spans(rows) == [(0, 4095, 0)]


def test_the_last_row_is_what_is_asked_for(half, device, assert_same_bits):
    scene = Scene(half, device)
    whole = scene.feed(scene.step(), end=9)[0]
    step = scene.step(seed=1)
    step.scratch.input_ids[:9] = scene.ids[:9].to(device)
    table = [step.caches.tables[i][1].clone() for i in range(3)]
    step = dataclasses.replace(step, caches=Caches(step.caches.layers, ()))
    last = step.run(step.scratch.input_ids, 0, 9, tables=tuple(table))
    assert_same_bits(last, whole[8:])
    with pytest.raises(ValueError, match="num_tokens must be 1 to 16, found 17"):
        step.run(step.scratch.input_ids, 0, 17)


def test_decode_goes_on_from_a_prefilled_prompt(device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    scene = Scene(dtype, device)
    before = 18
    prefill = scene.step()
    scene.feed(prefill, end=before)
    tiles = Tiles(**{f.name: Tile(32, 16, 2, 2, 2) for f in dataclasses.fields(Tiles)})
    inputs, V = Inputs.allocate(device), scene.weights.head.shape[0]
    logits = torch.full((16, V), float("nan"), device=device)
    caches = prefill.caches
    tables = tuple(table.roll(-1, 0) for table in caches.tables)
    step = TargetStep(
        scene.weights,
        Caches(caches.layers, tables),
        inputs,
        Scratch.allocate(scene.weights.layers, scene.weights.head, tiles),
        torch.zeros(16, dtype=torch.int32, device=device),
        logits=logits,
        launch=Launch(programs=2, attention_programs=2),
        tiles=tiles,
    )
    inputs.input_ids[:3] = scene.ids[before : before + 3].to(device)
    inputs.rows.num_rows.fill_(3)
    inputs.rows.num_requests.fill_(1)
    inputs.rows.row_count[0] = 3
    inputs.rows.positions[:3] = torch.arange(before, before + 3, device=device)
    step.run()
    expected = PagedRun(scene.target, [LENGTH]).step([(0, scene.ids)])[0][0]
    assert_near(logits[:3], expected[before : before + 3], dtype)


def test_how_long_chunks_are_changes_no_bits(half, device, assert_same_bits):
    scene = Scene(half, device)
    step, long = scene.step(), scene.step(seed=7, rows=3 * CHUNK)
    assert long.scratch.room.numel() < 3 * step.scratch.room.numel()
    expected, found = scene.feed(step), scene.feed(long)
    for mine, theirs in zip(found, expected, strict=True):
        assert_same_bits(mine, theirs)
    for mine, theirs in zip(scene.keys(long), scene.keys(step), strict=True):
        for which in (0, 1):
            assert_same_bits(mine[which], theirs[which])


@pytest.fixture
def own_kernels(device, monkeypatch):
    """What takes whole blocks in CUDA C++."""
    from lean_laguna.kernels.cuda import prompt_attention

    if device != "cuda":
        from support.cuda_emulation import emulate

        monkeypatch.setattr(prompt_attention, "launch_kernel", emulate)
    return {"attend_block": prompt_attention.attend_block}


@pytest.mark.slow
@pytest.mark.emulated
def test_whole_blocks_by_other_kernels_equal_the_model_too(
    device, own_kernels, assert_same_bits, monkeypatch
):
    # Under the interpreter without a short block and experts: it knows no products of bfloat16.
    on_gpu, block = device == "cuda", 128
    length = 256 + 44 * on_gpu
    monkeypatch.setattr(sys.modules[__name__], "LENGTH", length)
    monkeypatch.setattr(sys.modules[__name__], "CHUNK", block)
    heads = {"num_key_value_heads": 1, "num_attention_heads_per_layer": [2, 3, 2], "head_dim": 128}
    kinds = ["dense", "sparse" if on_gpu else "dense", "dense"]
    scene = Scene(torch.bfloat16, device, sliding_window=block, mlp_layer_types=kinds, **heads)
    short, long = (dataclasses.replace(scene.step(rows=rows), **own_kernels) for rows in (block, 3 * block))
    assert short.spans(block)[0][0] == 0
    (hidden, taps), found = scene.feed(short, length), scene.feed(long, length)
    expected, expected_taps = PagedRun(scene.target, [length]).step([(0, scene.ids)], TAPS)[0]
    assert_near(hidden.float() @ scene.weights.head.float().T, expected, torch.bfloat16)
    assert_near(taps, expected_taps, torch.bfloat16)
    assert_same_bits(found[0], hidden)
    assert_same_bits(found[1], taps)
    for mine, theirs in zip(scene.keys(long, length), scene.keys(short, length), strict=True):
        for which in (0, 1):
            assert_same_bits(mine[which], theirs[which])
