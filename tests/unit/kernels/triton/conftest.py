"""Small shapes for the Triton kernels; runs them under Triton's interpreter without a GPU."""

import os

import pytest
import torch

from support import kernel_twins

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


@pytest.fixture(scope="session")
def plain():
    """The twins."""
    return kernel_twins


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
def draw(device, dtype, own_seed):
    """Draw normal values in the model's dtype, fresh for every test, the same in each run."""
    generator = torch.Generator(device).manual_seed(own_seed)

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
