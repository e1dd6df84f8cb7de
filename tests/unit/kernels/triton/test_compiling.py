"""Whether Triton builds for a card is found out before anything is launched."""

import contextlib

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; it comes with PyTorch's CUDA builds")

from lean_laguna.kernels.triton import compiling


class Kernel:
    """Fails to build, as for a card newer than its compiler."""

    def warmup(self, *args, grid):
        raise RuntimeError("PTXAS error\nptxas fatal   : Value 'sm_110a' is not defined\nRepro command: ...")


def test_a_card_newer_than_triton_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (11, 0))
    monkeypatch.setattr(compiling, "_smallest_kernel", Kernel())
    found = compiling.why_not_built(torch.device("cuda", 0))
    assert "builds nothing for sm_110" in found
    assert "Value 'sm_110a' is not defined" in found


@pytest.mark.gpu
def test_nothing_is_wrong_with_the_card_here():
    assert compiling.why_not_built(torch.device("cuda", 0)) is None
