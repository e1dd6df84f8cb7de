"""CUDA C++ attention equals plain attention, appends keys, and keeps every row's bits its own."""

import dataclasses

import pytest
import torch

from lean_laguna.kernels.cuda import attention as module
from lean_laguna.kernels.cuda.attention import attend
from lean_laguna.kernels.triton.attention import AttentionShape
from lean_laguna.kernels.triton.launch import Launch
from support.kernel_twins import EPS, Scene

FULL = AttentionShape(num_heads=6, num_kv_heads=2, head_dim=128, rotary_dim=64)
SLIDING = AttentionShape(num_heads=8, num_kv_heads=2, head_dim=128, rotary_dim=128, window=150)


@pytest.fixture(autouse=True)
def small_clusters(monkeypatch):
    """Two programs a cluster, so that a small test's programs have several splits."""
    monkeypatch.setattr(module, "cluster_programs", lambda shape: 2)


def scene_of(shape, contexts, counts, draw, poisoned, device):
    return Scene(shape, contexts, counts, draw, poisoned, device, max_len=640, kv_block=16)


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
    (SLIDING, [253], [7]),
    (SLIDING, [3, 520], [4, 2]),
    (dataclasses.replace(SLIDING, causal=False, has_gate=False), [280, 12], [4, 3]),
    (dataclasses.replace(FULL, causal=False), [126], [5]),
]


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


@pytest.mark.parametrize("shape", [FULL, SLIDING])
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
