"""The CUDA context's own memory; what needs no kernel."""

import pytest
import torch

from lean_laguna.kernels.cuda.driver import stack_size


@pytest.mark.gpu
def test_a_context_gives_its_stack_back(device):
    card = torch.device(device, 0)
    torch.ones(1, device=card)
    before = stack_size(card, 1024)
    free = torch.cuda.mem_get_info(card)[0]
    assert before >= 1024
    assert stack_size(card, 0) < before
    assert torch.cuda.mem_get_info(card)[0] > free
    # What spills or sorts still runs.
    values = torch.randn(1 << 16, device=card)
    assert torch.equal(values.sort()[0], values.cpu().sort()[0].to(card))
