"""Attention over the paged cache equals plain attention, appends keys, and keeps every row's bits its own."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; it comes with PyTorch's CUDA builds")

from lean_laguna.kernels.triton import attention as module
from lean_laguna.kernels.triton.attention import AttentionShape, attend
from lean_laguna.kernels.triton.launch import Launch
from lean_laguna.kernels.triton.rows import Rows
from lean_laguna.kernels.triton.weights import rotary_tables

J, P, KV_BLOCK, EPS = 2, 16, 4, 1e-6
FULL = AttentionShape(num_heads=6, num_kv_heads=J, head_dim=P, rotary_dim=8)
SLIDING = AttentionShape(num_heads=4, num_kv_heads=J, head_dim=P, rotary_dim=P, window=9)


@pytest.fixture(autouse=True)
def short_splits(monkeypatch):
    """Near and far splits within a few dozen keys, so that a small test crosses them."""
    monkeypatch.setattr(module, "CHUNK", 16)
    monkeypatch.setattr(module, "NEAR_SPLITS", 2)
    monkeypatch.setattr(module, "FAR_CHUNKS", 2)


class Scene:
    """Requests with a context already in the cache, and rows of raw q, k, v, gate to come."""

    def __init__(self, shape, contexts, counts, draw, poisoned, device, max_len=128):
        self.shape, self.contexts, self.counts = shape, contexts, counts
        dtype = draw(1).dtype
        inv_freq = 10000.0 ** -(torch.arange(shape.rotary_dim // 2, device=device) / (shape.rotary_dim // 2))
        self.rotary = rotary_tables(inv_freq, max_len, 1.1, dtype)
        self.norms = (draw(P) * 0.2 + 1, draw(P) * 0.2 + 1)
        blocks = max_len // KV_BLOCK
        order = torch.randperm(blocks * len(contexts), device=device).to(torch.int32) + 1
        self.table = torch.zeros(16, blocks, dtype=torch.int32, device=device)
        self.table[: len(contexts)] = order.view(len(contexts), blocks)
        # Slots never written hold NaN: none may reach a sum.
        self.cache = tuple(poisoned(blocks * len(contexts) + 1, KV_BLOCK, J, P) for _ in range(2))
        self.context = [(draw(n, J, P), draw(n, J, P)) for n in contexts]
        for r, (k, v) in enumerate(self.context):
            block, slot = self.place(r, torch.arange(len(k), device=device))
            self.cache[0][block, slot], self.cache[1][block, slot] = k, v
        self.qkv = poisoned(16, shape.width)
        starts = [sum(counts[:r]) for r in range(len(counts))]
        self.starts, self.total = starts, sum(counts)
        self.qkv[: self.total] = draw(self.total, shape.width)

        def ints(values):
            return torch.tensor(values + [0] * (16 - len(values)), dtype=torch.int32, device=device)

        spread = [(r, i) for r, n in enumerate(counts) for i in range(n)]
        self.rows = Rows(
            num_rows=torch.tensor([self.total], dtype=torch.int32, device=device),
            num_requests=torch.tensor([len(counts)], dtype=torch.int32, device=device),
            row_start=ints(starts),
            row_count=ints(list(counts)),
            row_request=ints([r for r, _ in spread]),
            positions=ints([contexts[r] + i for r, i in spread]),
        )
        splits = shape.num_splits(max_len)
        size = 16 * shape.num_heads * splits
        self.workspace = (poisoned(size * P, of=torch.float32), poisoned(size * 2, of=torch.float32))
        self.out = poisoned(16, shape.num_heads * P)

    def place(self, request, positions):
        return self.table[request, positions // KV_BLOCK].long(), positions % KV_BLOCK

    def run(self, programs=5):
        attend(
            self.qkv,
            self.out,
            self.norms,
            self.rotary,
            self.cache,
            self.table,
            self.rows,
            self.workspace,
            self.shape,
            Launch(attention_programs=programs),
            eps=EPS,
        )
        return self.out

    def expected(self, plain):
        shape, out = self.shape, []
        H = shape.num_heads
        for r, (start, n, before) in enumerate(zip(self.starts, self.counts, self.contexts, strict=True)):
            rows = self.qkv[start : start + n]
            q, k, v, gate = rows.split([H * P, J * P, J * P, H * shape.has_gate], -1)
            at = torch.arange(before, before + n, device=q.device)
            cos, sin = (t[at] for t in self.rotary)
            q = plain.rotate(plain.rms_norm(q.view(n, H, P), self.norms[0], EPS), cos, sin)
            k = plain.rotate(plain.rms_norm(k.view(n, J, P), self.norms[1], EPS), cos, sin)
            keys = torch.cat((self.context[r][0], k))
            values = torch.cat((self.context[r][1], v.view(n, J, P)))
            until = None if shape.causal else before + n - 1
            y = plain.attention(q, keys, values, at, window=shape.window, causal_until=until)
            if shape.has_gate:
                opened = torch.nn.functional.softplus(gate.float()).to(y.dtype)
                y = (y.float() * opened.float()[..., None]).to(y.dtype)
            out.append((y.reshape(n, -1), k, v.view(n, J, P), at))
        return out


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
    plain, draw, poisoned, device, tolerance, shape, contexts, counts
):
    scene = Scene(shape, contexts, counts, draw, poisoned, device)
    out = scene.run()
    for r, (y, k, v, at) in enumerate(scene.expected(plain)):
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
    together = block.run().clone()
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
        assert_same_bits(single.run(programs=3)[0], together[i])


def test_a_row_does_not_depend_on_other_requests(draw, poisoned, device, assert_same_bits):
    crowd = Scene(FULL, [50, 33, 9], [3, 4, 2], draw, poisoned, device)
    together = crowd.run().clone()
    alone = Scene(FULL, [33], [4], draw, poisoned, device)
    alone.norms, alone.rotary = crowd.norms, crowd.rotary
    at = torch.arange(33, device=device)
    b0, s0 = crowd.place(1, at)
    b1, s1 = alone.place(0, at)
    for mine, theirs in zip(alone.cache, crowd.cache, strict=True):
        mine[b1, s1] = theirs[b0, s0]
    alone.qkv[:4] = crowd.qkv[3:7]
    assert_same_bits(alone.run()[:4], together[3:7])
