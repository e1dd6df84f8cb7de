"""CUDA C++ attention equals plain attention, appends keys, and keeps every row's bits its own."""

import dataclasses

import pytest
import torch

from lean_laguna.kernels.cuda import attention as module
from lean_laguna.kernels.cuda.attention import attend, num_splits
from lean_laguna.kernels.triton.attention import AttentionShape
from lean_laguna.kernels.triton.launch import Launch
from support.kernel_twins import EPS, Scene

FULL = AttentionShape(num_heads=6, num_kv_heads=2, head_dim=128, rotary_dim=64)
SLIDING = AttentionShape(num_heads=8, num_kv_heads=2, head_dim=128, rotary_dim=128, window=70)


@pytest.fixture(autouse=True)
def short_splits(monkeypatch):
    """Splits of 64 keys, so that a small test crosses them."""
    monkeypatch.setattr(module, "split_keys", lambda shape: 64)


def scene_of(shape, contexts, counts, draw, poisoned, device):
    scene = Scene(shape, contexts, counts, draw, poisoned, device, max_len=320, kv_block=16)
    scene.parts = 16 * shape.num_heads * num_splits(shape, 320)
    return scene


def run(scene, poisoned):
    arrived = torch.zeros(16 * scene.shape.num_heads, dtype=torch.int32, device=scene.qkv.device)
    workspace = (poisoned(scene.parts * 128, of=torch.float32), poisoned(scene.parts * 2, of=torch.float32))
    attend(
        scene.qkv,
        scene.out,
        scene.norms,
        scene.rotary,
        scene.cache,
        scene.table,
        scene.rows,
        workspace,
        arrived,
        scene.shape,
        Launch(16),
        eps=EPS,
    )
    assert not arrived.any()
    return scene.out


CASES = [
    (FULL, [31, 0, 250], [2, 5, 6]),
    (SLIDING, [125], [7]),
    (SLIDING, [3, 260], [4, 2]),
    (dataclasses.replace(SLIDING, causal=False, has_gate=False), [140, 12], [4, 3]),
    (dataclasses.replace(FULL, causal=False), [62], [5]),
]


@pytest.mark.parametrize(("shape", "contexts", "counts"), CASES)
def test_attention_equals_its_twin_and_appends_keys(draw, poisoned, device, shape, contexts, counts):
    scene = scene_of(shape, contexts, counts, draw, poisoned, device)
    out = run(scene, poisoned)
    for r, (y, k, v, at) in enumerate(scene.expected()):
        own = slice(scene.starts[r], scene.starts[r] + counts[r])
        torch.testing.assert_close(out[own], y, atol=3e-2, rtol=3e-2)
        block, slot = scene.place(r, at)
        torch.testing.assert_close(scene.cache[0][block, slot], k, atol=2e-2, rtol=2e-2)
        assert torch.equal(scene.cache[1][block, slot], v)
    assert out[scene.total :].isnan().all()


@pytest.mark.parametrize("shape", [FULL, SLIDING])
def test_a_verified_row_has_the_bits_of_plain_decoding(draw, poisoned, device, shape):
    before, n = 125, 7
    block = scene_of(shape, [before], [n], draw, poisoned, device)
    together = run(block, poisoned).clone()
    for i in range(n):
        alone = scene_of(shape, [40, before + i], [3, 1], draw, poisoned, device)
        alone.norms, alone.rotary = block.norms, block.rotary
        at = torch.arange(before + i, device=device)
        source, slot = block.place(0, at)
        to, to_slot = alone.place(1, at)
        for mine, theirs in zip(alone.cache, block.cache, strict=True):
            mine[to, to_slot] = theirs[source, slot]
        alone.qkv[3] = block.qkv[i]
        assert torch.equal(run(alone, poisoned)[3].view(torch.int16), together[i].view(torch.int16))
