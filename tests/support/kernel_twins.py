"""Plain PyTorch twins of the GPU kernels, and rows with a context for attention to work on.

Each twin computes in float32 and rounds to the model's dtype where Hugging Face's modeling_laguna.py does.
"""

import torch
import torch.nn.functional as F

from lean_laguna.core.engine_sizes import MAX_ROWS
from lean_laguna.kernels.triton.rows import Rows
from lean_laguna.kernels.triton.weights import rotary_tables

EPS = 1e-6


def rms_norm(x, weight, eps):
    wide = x.float()
    scaled = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return (scaled.float() * weight.float()).to(x.dtype)


def linear(x, weight):
    return (x.float() @ weight.float().T).to(x.dtype)


def silu_and_mul(gate_up):
    gate, up = gate_up.float().chunk(2, -1)
    return (F.silu(gate).to(gate_up.dtype).float() * up).to(gate_up.dtype)


def rotate(x, cos, sin):
    """x [T, H, P]; cos and sin [T, R / 2]."""
    half, dtype = cos.shape[-1], x.dtype
    first, second, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    c, s = cos.float()[:, None], sin.float()[:, None]

    def turned(a, b):
        return ((a * c).to(dtype).float() + (b * s).to(dtype).float()).to(dtype)

    return torch.cat((turned(first, -second), turned(second, first), rest), -1)


def route(scores, bias, top_k):
    sigmoid = torch.sigmoid(scores.float())
    ids = torch.sort(sigmoid + bias, dim=-1, descending=True, stable=True)[1][:, :top_k]
    weights = sigmoid.gather(1, ids)
    weights = (weights / weights.sum(-1, keepdim=True)).to(scores.dtype)
    return weights.float(), ids


def moe(x, gate_up, down, weights, ids):
    """Sum over experts in ascending id, float32."""
    out = torch.zeros(x.shape[0], down.shape[1], device=x.device)
    for row in range(x.shape[0]):
        for a in ids[row].argsort():
            e = ids[row, a]
            act = silu_and_mul(linear(x[row : row + 1], gate_up[e]))
            out[row] += weights[row, a] * (act.float() @ down[e].float().T)[0]
    return out


def attention(q, keys, values, q_positions, *, window, causal_until=None):
    """q [T, H, P]; keys and values [S, J, P] of positions 0..S-1; causal unless told what all rows see."""
    _, H, P = q.shape
    S, J, _ = keys.shape
    k = keys.float().repeat_interleave(H // J, 1)
    v = values.float().repeat_interleave(H // J, 1)
    scores = torch.einsum("thp,shp->hts", q.float(), k) * P**-0.5
    at, key = q_positions[:, None], torch.arange(S, device=q.device)[None, :]
    seen = key <= (at if causal_until is None else causal_until)
    if window:
        seen = seen & ((at - key).abs() < window)
    scores = scores.masked_fill(~seen[None], float("-inf"))
    return torch.einsum("hts,shp->thp", scores.softmax(-1), v).to(q.dtype)


def encode_values(values, scale):
    """Codes of keys or values in an FP8 cache: e4m3 of ``values / scale``, saturated."""
    return (values.float() / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


class Scene:
    """Requests with a context already in the cache, and rows of raw q, k, v, gate to come."""

    def __init__(self, shape, contexts, counts, draw, poisoned, device, max_len=128, kv_block=4):
        self.shape, self.contexts, self.counts, self.kv_block = shape, contexts, counts, kv_block
        J, P = shape.num_kv_heads, shape.head_dim
        dtype = draw(1).dtype
        inv_freq = 10000.0 ** -(torch.arange(shape.rotary_dim // 2, device=device) / (shape.rotary_dim // 2))
        self.rotary = rotary_tables(inv_freq, max_len, 1.1, dtype)
        self.norms = (draw(P) * 0.2 + 1, draw(P) * 0.2 + 1)
        blocks = max_len // self.kv_block
        order = torch.randperm(blocks * len(contexts), device=device).to(torch.int32) + 1
        self.table = torch.zeros(MAX_ROWS, blocks, dtype=torch.int32, device=device)
        self.table[: len(contexts)] = order.view(len(contexts), blocks)
        # Slots never written hold NaN: none may reach a sum.
        self.cache = tuple(poisoned(blocks * len(contexts) + 1, self.kv_block, J, P) for _ in range(2))
        self.context = [(draw(n, J, P), draw(n, J, P)) for n in contexts]
        for r, (k, v) in enumerate(self.context):
            block, slot = self.place(r, torch.arange(len(k), device=device))
            self.cache[0][block, slot], self.cache[1][block, slot] = k, v
        most = max(16, sum(counts))
        self.qkv = poisoned(most, shape.width)
        starts = [sum(counts[:r]) for r in range(len(counts))]
        self.starts, self.total = starts, sum(counts)
        self.qkv[: self.total] = draw(self.total, shape.width)

        def ints(values):
            return torch.tensor(values + [0] * (MAX_ROWS - len(values)), dtype=torch.int32, device=device)

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
        self.out = poisoned(most, shape.num_heads * P)

    def place(self, request, positions):
        return self.table[request, positions // self.kv_block].long(), positions % self.kv_block

    def expected(self):
        shape, out = self.shape, []
        H, J, P = shape.num_heads, shape.num_kv_heads, shape.head_dim
        for r, (start, n, before) in enumerate(zip(self.starts, self.counts, self.contexts, strict=True)):
            rows = self.qkv[start : start + n]
            q, k, v, gate = rows.split([H * P, J * P, J * P, H * shape.has_gate], -1)
            at = torch.arange(before, before + n, device=q.device)
            cos, sin = (t[at] for t in self.rotary)
            q = rotate(rms_norm(q.view(n, H, P), self.norms[0], EPS), cos, sin)
            k = rotate(rms_norm(k.view(n, J, P), self.norms[1], EPS), cos, sin)
            keys = torch.cat((self.context[r][0], k))
            values = torch.cat((self.context[r][1], v.view(n, J, P)))
            until = None if shape.causal else before + n - 1
            y = attention(q, keys, values, at, window=shape.window, causal_until=until)
            if shape.has_gate:
                opened = torch.nn.functional.softplus(gate.float()).to(y.dtype)
                y = (y.float() * opened.float()[..., None]).to(y.dtype)
            out.append((y.reshape(n, H * P), k, v.view(n, J, P), at))
        return out
