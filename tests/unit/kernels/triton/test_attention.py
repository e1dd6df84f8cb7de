"""Attention over the paged cache equals plain attention, appends keys, and keeps every row's bits its own."""

import dataclasses

import pytest
import torch

from support.kernel_twins import EPS, Scene

pytest.importorskip("triton", reason="Triton is not installed; it comes with PyTorch's CUDA builds")

from lean_laguna.kernels.triton import attention as module
from lean_laguna.kernels.triton.attention import AttentionShape, attend
from lean_laguna.kernels.triton.launch import Launch

J, P = 2, 16
FULL = AttentionShape(num_heads=6, num_kv_heads=J, head_dim=P, rotary_dim=8)
SLIDING = AttentionShape(num_heads=4, num_kv_heads=J, head_dim=P, rotary_dim=P, window=9)


@pytest.fixture(autouse=True)
def short_splits(monkeypatch):
    """Near and far splits within a few dozen keys, so that a small test crosses them."""
    monkeypatch.setattr(module, "CHUNK", 16)
    monkeypatch.setattr(module, "NEAR_SPLITS", 2)
    monkeypatch.setattr(module, "FAR_CHUNKS", 2)


def run(scene, programs=5):
    attend(
        scene.qkv,
        scene.out,
        scene.norms,
        scene.rotary,
        scene.cache,
        scene.table,
        scene.rows,
        scene.workspace,
        scene.shape,
        Launch(attention_programs=programs),
        eps=EPS,
    )
    return scene.out


CASES = [
    (FULL, [70], [3]),
    (FULL, [31, 0, 90], [2, 5, 1]),
    (SLIDING, [37], [7]),
    (SLIDING, [3, 60], [4, 2]),
    (dataclasses.replace(SLIDING, causal=False, has_gate=False), [40, 12], [4, 3]),
    (dataclasses.replace(FULL, causal=False), [30], [5]),
]


@pytest.mark.parametrize(("shape", "contexts", "counts"), CASES)
def test_attention_equals_its_twin_and_appends_keys(
    draw, poisoned, device, tolerance, shape, contexts, counts
):
    scene = Scene(shape, contexts, counts, draw, poisoned, device)
    out = run(scene)
    for r, (y, k, v, at) in enumerate(scene.expected()):
        own = slice(scene.starts[r], scene.starts[r] + counts[r])
        torch.testing.assert_close(out[own], y, atol=4 * tolerance, rtol=4 * tolerance)
        block, slot = scene.place(r, at)
        torch.testing.assert_close(scene.cache[0][block, slot], k, atol=tolerance, rtol=tolerance)
        assert torch.equal(scene.cache[1][block, slot], v)
    assert out[scene.total :].isnan().all()


@pytest.mark.parametrize("shape", [FULL, SLIDING])
def test_a_verified_row_has_the_bits_of_plain_decoding(draw, poisoned, device, assert_same_bits, shape):
    before, n = 61, 7
    block = Scene(shape, [before], [n], draw, poisoned, device)
    together = run(block).clone()
    for i in range(n):
        single = Scene(shape, [before], [1], draw, poisoned, device)
        single.norms, single.rotary = block.norms, block.rotary
        # What decoding row by row would have left in the cache: the context and rows before this one.
        at = torch.arange(before + i, device=device)
        b0, s0 = block.place(0, at)
        b1, s1 = single.place(0, at)
        for mine, theirs in zip(single.cache, block.cache, strict=True):
            mine[b1, s1] = theirs[b0, s0]
        single.qkv[0] = block.qkv[i]
        single.rows.positions[0] = before + i
        assert_same_bits(run(single, programs=3)[0], together[i])


def test_a_row_does_not_depend_on_other_requests(draw, poisoned, device, assert_same_bits):
    crowd = Scene(FULL, [50, 33, 9], [3, 4, 2], draw, poisoned, device)
    together = run(crowd).clone()
    alone = Scene(FULL, [33], [4], draw, poisoned, device)
    alone.norms, alone.rotary = crowd.norms, crowd.rotary
    at = torch.arange(33, device=device)
    b0, s0 = crowd.place(1, at)
    b1, s1 = alone.place(0, at)
    for mine, theirs in zip(alone.cache, crowd.cache, strict=True):
        mine[b1, s1] = theirs[b0, s0]
    alone.qkv[:4] = crowd.qkv[3:7]
    assert_same_bits(run(alone)[:4], together[3:7])
