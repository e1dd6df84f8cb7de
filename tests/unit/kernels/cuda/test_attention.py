"""CUDA C++ attention equals plain attention, appends keys, and keeps every row's bits its own."""

import dataclasses

import pytest
import torch

from lean_laguna.kernels.cuda import attention as module
from lean_laguna.kernels.cuda.attention import attend
from lean_laguna.kernels.triton.attention import AttentionShape
from lean_laguna.kernels.triton.launch import Launch
from support.cuda_emulation import late_inputs
from support.kernel_twins import EPS, Scene

FULL = AttentionShape(num_heads=6, num_kv_heads=2, head_dim=128, rotary_dim=64)
SLIDING = AttentionShape(num_heads=8, num_kv_heads=2, head_dim=128, rotary_dim=128, window=150)


@pytest.fixture
def small_clusters(monkeypatch):
    """Few parts and programs, so that a small test's have several splits and parts."""
    monkeypatch.setattr(module, "PARTS", 4)
    monkeypatch.setattr(
        module,
        "cluster_programs",
        lambda shape, cols: {1: (4, 4), 8: (4, 2), 16: (2, 2), 32: (2, 2), 64: (1, 1)}[cols],
    )


def scene_of(shape, contexts, counts, draw, poisoned, device, kv_block=16):
    return Scene(shape, contexts, counts, draw, poisoned, device, max_len=2304, kv_block=kv_block)


def run(scene, cols=16):
    attend(
        scene.qkv,
        scene.out,
        scene.norms,
        scene.rotary,
        scene.cache,
        scene.table,
        scene.rows,
        scene.shape,
        Launch(cols),
        eps=EPS,
    )
    return scene.out


CASES = [
    (FULL, [31, 0, 250], [2, 5, 6]),
    (FULL, [600], [8]),
    (FULL, [40, 300, 20, 513], [0, 3, 0, 1]),
    (SLIDING, [253], [7]),
    (SLIDING, [3, 520], [4, 2]),
    (dataclasses.replace(SLIDING, causal=False, has_gate=False), [280, 12], [4, 3]),
    (dataclasses.replace(FULL, causal=False), [126], [5]),
]


@pytest.mark.usefixtures("small_clusters")
@pytest.mark.parametrize(("shape", "contexts", "counts"), CASES)
def test_attention_equals_its_twin_and_appends_keys(draw, poisoned, device, shape, contexts, counts):
    scene = scene_of(shape, contexts, counts, draw, poisoned, device)
    out = run(scene)
    for r, (y, k, v, at) in enumerate(scene.expected()):
        own = slice(scene.starts[r], scene.starts[r] + counts[r])
        torch.testing.assert_close(out[own], y, atol=3e-2, rtol=3e-2)
        block, slot = scene.place(r, at)
        torch.testing.assert_close(scene.cache[0][block, slot], k, atol=2e-2, rtol=2e-2)
        assert torch.equal(scene.cache[1][block, slot], v)
    assert out[scene.total :].isnan().all()


@pytest.mark.usefixtures("small_clusters")
@pytest.mark.parametrize("kv_block", [4, 48])
def test_pages_hold_as_many_keys_as_they_like_if_a_warps_are_whole_pages_or_in_one(
    draw, poisoned, device, kv_block
):
    assert module.fits_pages(kv_block)
    scene = scene_of(SLIDING, [253], [7], draw, poisoned, device, kv_block)
    torch.testing.assert_close(run(scene)[:7], next(iter(scene.expected()))[0], atol=3e-2, rtol=3e-2)


def test_what_the_loads_cannot_take_does_not_fit():
    assert not module.fits_pages(24)
    assert not module.fits_pages(3)
    assert module.fits_attention(FULL)
    # Odd rows of q, k, v and gates would start at odd elements.
    assert not module.fits_attention(dataclasses.replace(FULL, num_heads=9, num_kv_heads=3))
    assert module.fits_attention(dataclasses.replace(FULL, num_heads=9, num_kv_heads=3, has_gate=False))


@pytest.mark.usefixtures("small_clusters")
@pytest.mark.parametrize(
    ("shape", "counts", "cols"),
    [(FULL, [3, 0, 16, 1, 0, 7], 32), (SLIDING, [1, 0, 2] * 12 + [0, 9], 64)],
)
def test_rows_of_many_requests_have_the_bits_of_few(draw, poisoned, device, shape, counts, cols):
    contexts = [37 * r % 331 for r in range(len(counts))]
    scene = scene_of(shape, contexts, counts, draw, poisoned, device)
    together = run(scene, cols).clone()
    assert together[scene.total :].isnan().all()
    rows, qkv = scene.rows, scene.qkv.clone()
    for r in (0, len(counts) - 1):
        start, n = scene.starts[r], counts[r]
        rows.num_requests.fill_(1)
        rows.row_start[0], rows.row_count[0] = 0, n
        rows.positions[:n] = contexts[r] + torch.arange(n, device=device)
        scene.qkv[:n] = qkv[start : start + n]
        scene.table[0] = scene.table[r].clone()
        alone = run(scene, 16)[:n]
        assert torch.equal(alone.view(torch.int16), together[start : start + n].view(torch.int16))


@pytest.mark.usefixtures("small_clusters")
@pytest.mark.parametrize(
    ("heads", "counts"), [(1, [1]), (3, [1]), (2, [7]), (3, [3, 0, 2]), (1, [1, 1, 1, 1, 1])]
)
def test_how_many_programs_share_a_task_changes_no_bit(draw, poisoned, device, monkeypatch, heads, counts):
    """Half of a cluster may have a task more than the other half, or none at all."""
    shape = dataclasses.replace(SLIDING, num_heads=4 * heads, num_kv_heads=heads)
    scene = scene_of(shape, [253, 40, 517, 3, 130][: len(counts)], counts, draw, poisoned, device)
    together = []
    for crowd in (0, 1000):  # all tasks are too many, and none
        monkeypatch.setattr(module, "CROWD", crowd)
        together.append(run(scene, 8)[: scene.total].clone())
        scene.out.fill_(float("nan"))
    halves, whole = together
    assert not halves.isnan().any()
    assert torch.equal(halves.view(torch.int16), whole.view(torch.int16))
    assert torch.equal(run(scene, 16)[: scene.total].view(torch.int16), whole.view(torch.int16))


@pytest.mark.usefixtures("small_clusters")
@pytest.mark.parametrize("shape", [FULL, SLIDING, dataclasses.replace(FULL, num_heads=18, num_kv_heads=1)])
def test_a_verified_row_has_the_bits_of_plain_decoding(draw, poisoned, device, shape):
    before, n = 381, 7
    block = scene_of(shape, [before], [n], draw, poisoned, device)
    together = run(block).clone()
    for i in range(n):
        for contexts, cols in (([40, before + i], 16), ([before + i], 1)):
            r = len(contexts) - 1
            alone = scene_of(shape, contexts, [3, 1][-len(contexts) :], draw, poisoned, device)
            alone.norms, alone.rotary = block.norms, block.rotary
            at = torch.arange(before + i, device=device)
            source, slot = block.place(0, at)
            to, to_slot = alone.place(r, at)
            for mine, theirs in zip(alone.cache, block.cache, strict=True):
                mine[to, to_slot] = theirs[source, slot]
            alone.qkv[3 * r] = block.qkv[i]
            row = run(alone, cols)[3 * r]
            assert torch.equal(row.view(torch.int16), together[i].view(torch.int16))


ONE_HEAD = {
    "full": AttentionShape(num_heads=6, num_kv_heads=1, head_dim=128, rotary_dim=64),
    "window": AttentionShape(num_heads=8, num_kv_heads=1, head_dim=128, rotary_dim=128, window=512),
}


@pytest.mark.parametrize("kind", ["full", "window"])
def test_clusters_as_large_as_on_a_card_give_the_same_bits(draw, poisoned, device, kind):
    before = 2045  # six rows from there are in two splits
    block = scene_of(ONE_HEAD[kind], [before], [6], draw, poisoned, device)
    together = run(block, 8).clone()
    for i in (0, 4):
        alone = scene_of(ONE_HEAD[kind], [before + i], [1], draw, poisoned, device)
        alone.norms, alone.rotary = block.norms, block.rotary
        alone.cache, alone.table = block.cache, block.table
        alone.qkv[0] = block.qkv[i]
        row = run(alone, 1)[0]
        assert torch.equal(row.view(torch.int16), together[i].view(torch.int16))


@pytest.mark.usefixtures("small_clusters")
@pytest.mark.parametrize("cols", [1, 8, 16, 64])
@pytest.mark.parametrize("counts", [[], [0], [0, 0, 0]])
def test_a_step_of_no_rows_writes_nothing(draw, poisoned, device, counts, cols):
    scene = scene_of(FULL, [300] * max(len(counts), 1), counts or [0], draw, poisoned, device)
    scene.rows.num_requests.fill_(len(counts))
    scene.rows.positions.fill_(2**30)  # of rows that there are not
    before = [pages.clone() for pages in scene.cache]
    assert run(scene, cols).isnan().all()
    for pages, kept in zip(scene.cache, before, strict=True):
        assert torch.equal(pages.view(torch.int16), kept.view(torch.int16))


@pytest.mark.usefixtures("small_clusters")
@pytest.mark.parametrize("cols", [1, 8])
def test_what_the_kernel_before_leaves_is_read_after_the_wait_alone(draw, poisoned, device, cols):
    scene = scene_of(FULL, [300], [1], draw, poisoned, device)
    values = scene.qkv.clone()
    expected = run(scene, cols)[0].clone()
    scene.out.fill_(float("nan"))
    if device == "cpu":
        scene.qkv.fill_(float("nan"))
        late_inputs.append((scene.qkv, values))
    assert torch.equal(run(scene, cols)[0].view(torch.int16), expected.view(torch.int16))
