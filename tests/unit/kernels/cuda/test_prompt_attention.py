"""Attention of a whole block of a prompt equals plain attention; a row's bits are its own."""

import dataclasses

import pytest
import torch

from lean_laguna.kernels.cuda import prompt_attention as module
from lean_laguna.kernels.cuda.prompt_attention import attend_block, fits_prompts
from lean_laguna.kernels.triton.attention import AttentionShape
from lean_laguna.kernels.triton.weights import rotary_tables
from support import kernel_twins as plain
from support.prompt_images import images_of

J, P, EPS = 2, 128, 1e-6
FULL = AttentionShape(num_heads=8, num_kv_heads=J, head_dim=P, rotary_dim=64)
FEW = dataclasses.replace(FULL, num_heads=4, has_gate=False)
SLIDING = AttentionShape(num_heads=2, num_kv_heads=J, head_dim=P, rotary_dim=P, window=256, has_gate=False)
PLAIN = dataclasses.replace(SLIDING, has_qk_norm=False, window=128)


class Scene:
    """A sequence up to the end of a block; raw queries, ready keys."""

    def __init__(self, shape, end, draw, device):
        self.shape, self.end = shape, end
        inv_freq = 10000.0 ** -(torch.arange(shape.rotary_dim // 2, device=device) / (shape.rotary_dim // 2))
        self.rotary = rotary_tables(inv_freq, 1024, 1.1, torch.bfloat16)
        self.norm = draw(P) * 0.2 + 1
        self.qkv = draw(end, shape.width)
        self.keys, self.values = draw(end, J, P), draw(end, J, P)

    def run(self, first, n, count, poisoned, rows):
        shape = self.shape
        qkv, out = poisoned(rows, shape.width), poisoned(rows, shape.num_heads * P)
        qkv[:n] = self.qkv[first : first + n]
        base = max(0, first - shape.window) if shape.window else 0
        end = first + n
        zeros = torch.zeros(-end % 128, J, P, dtype=torch.bfloat16, device=qkv.device)
        images = images_of(*(torch.cat((t[base:end], zeros)) for t in (self.keys, self.values)))
        attend_block(qkv, out, self.norm, self.rotary, images, shape, count(first), count(n), eps=EPS)
        assert out[n:].isnan().all()
        return out[:n]

    def expected(self):
        shape, end = self.shape, self.end
        H = shape.num_heads
        q = self.qkv[:, : H * P].reshape(end, H, P)
        if shape.has_qk_norm:
            q = plain.rms_norm(q, self.norm, EPS)
        q = plain.rotate(q, *(t[:end] for t in self.rotary)).float()
        keys, values = (t.float().repeat_interleave(H // J, 1) for t in (self.keys, self.values))
        at = torch.arange(end, device=q.device)
        seen = at[None] <= at[:, None]
        if shape.window:
            seen &= at[:, None] - at[None] < shape.window
        scores = (torch.einsum("thp,shp->hts", q, keys) * P**-0.5).masked_fill(~seen, float("-inf"))
        y = torch.einsum("hts,shp->thp", scores.softmax(-1), values).to(torch.bfloat16)
        if shape.has_gate:
            gate = self.qkv[:, (H + 2 * J) * P :].float()
            y = y * torch.nn.functional.softplus(gate).to(torch.bfloat16)[..., None]
        return y.reshape(end, -1)


@pytest.mark.parametrize(
    ("shape", "first", "n"), [(FEW, 0, 250), (FULL, 128, 128), (SLIDING, 384, 200), (PLAIN, 0, 256)]
)
def test_a_block_attends_as_plain_attention_does(draw, poisoned, device, count, shape, first, n):
    scene = Scene(shape, first + n, draw, device)
    got = scene.run(first, n, count, poisoned, 256)
    torch.testing.assert_close(got, scene.expected()[first:], atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("shape", [FEW, SLIDING])
def test_bits_depend_on_neither_block_nor_programs(draw, poisoned, device, count, shape, monkeypatch):
    scene = Scene(shape, 512, draw, device)
    whole = scene.run(0, 512, count, poisoned, 512)
    monkeypatch.setattr(module, "multiprocessors", lambda device: 3)
    monkeypatch.setattr(module, "CLUSTER", 2)
    parts = [scene.run(first, 256, count, poisoned, 256) for first in (0, 256)]
    assert torch.equal(torch.cat(parts), whole)


def test_rows_that_do_not_start_at_sixteen_bytes_do_not_fit():
    for heads in (8, 48, 64, 72):
        assert fits_prompts(dataclasses.replace(FULL, num_heads=heads), 1024)
    assert fits_prompts(FEW, 1024)
    assert not fits_prompts(dataclasses.replace(FEW, has_gate=True), 1024)
