"""Plain PyTorch twins and small shapes for the Triton kernels; runs them under Triton's interpreter without a
GPU.

Each twin computes in float32 and rounds to the model's dtype where Hugging Face's modeling_laguna.py does.
"""

import os
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"


def _let_the_interpreter_count():
    """NumPy 2.4 no longer turns one-element arrays into integers, which Triton 3.6's interpreter needs."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


if not HAS_GPU:
    _let_the_interpreter_count()


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


@pytest.fixture(scope="session")
def plain():
    """The twins."""
    return SimpleNamespace(
        rms_norm=rms_norm,
        linear=linear,
        silu_and_mul=silu_and_mul,
        rotate=rotate,
        route=route,
        moe=moe,
        attention=attention,
    )


@pytest.fixture(scope="session")
def device():
    return "cuda" if HAS_GPU else "cpu"


@pytest.fixture(params=["float32", "float16"] if not HAS_GPU else ["bfloat16", "float16"])
def dtype(request):
    """Under the interpreter dots take no bfloat16; float16 shows the same rounding points."""
    return getattr(torch, request.param)


@pytest.fixture
def tolerance(dtype):
    """A few units in the last place of values near 1: sums in another order, roundings elsewhere."""
    return {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]


@pytest.fixture
def draw(device, dtype):
    """Draw normal values in the model's dtype, fresh for every test."""
    generator = torch.Generator(device).manual_seed(torch.seed() % 2**31)

    def normal(*size, scale=1.0, of=None):
        return (torch.randn(size, generator=generator, device=device) * scale).to(of or dtype)

    return normal


@pytest.fixture
def poisoned(device, dtype):
    """A buffer of NaN: what a kernel leaves unwritten shows."""

    def make(*size, of=None):
        return torch.full(size, float("nan"), device=device, dtype=of or dtype)

    return make


@pytest.fixture
def count(device):
    """A device scalar or vector of int32."""

    def make(*values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    return make


def same_bits(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.fixture(scope="session")
def assert_same_bits():
    def check(a, b):
        assert same_bits(a, b)

    return check
