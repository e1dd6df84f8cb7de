"""The CUDA C++ kernels on a GPU where there is one, otherwise in the emulator."""

import shutil

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU and shutil.which("g++") is None:
    collect_ignore_glob = ["test_*"]


@pytest.fixture(autouse=True)
def emulator(monkeypatch):
    if not HAS_GPU:
        from lean_laguna.kernels.cuda import (
            attention,
            packed_products,
            products,
            prompt_attention,
            wide_experts,
        )
        from support.cuda_emulation import emulate

        for module in (attention, products, packed_products, prompt_attention, wide_experts):
            monkeypatch.setattr(module, "launch_kernel", emulate)


@pytest.fixture(scope="session")
def device():
    return "cuda" if HAS_GPU else "cpu"


@pytest.fixture
def draw(device, own_seed):
    """Draw normal values in bfloat16, fresh for every test, the same in each run."""
    generator = torch.Generator(device).manual_seed(own_seed)

    def normal(*size, scale=1.0, of=torch.bfloat16):
        return (torch.randn(size, generator=generator, device=device) * scale).to(of)

    return normal


@pytest.fixture
def poisoned(device):
    """Return memory full of NaN."""

    def full(*size, of=torch.bfloat16):
        return torch.full(size, float("nan"), dtype=of, device=device)

    return full


@pytest.fixture
def count(device):
    """Return a number of live rows as the kernels read it."""
    return lambda n: torch.tensor([n], dtype=torch.int32, device=device)
