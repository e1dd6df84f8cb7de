"""top_k, top_p and min_p on the device choose what the host's sampler chooses from the same logits."""

import math

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; it comes with PyTorch's CUDA builds")

from lean_laguna.core.types import SamplingParams
from lean_laguna.kernels.triton.filters import Filters, choose_filtered
from lean_laguna.kernels.triton.launch import Launch
from lean_laguna.kernels.triton.rows import Rows
from lean_laguna.spec.noise import NoiseCache
from lean_laguna.spec.request import SamplingRequest
from lean_laguna.spec.sampling import RowBlock, sample_rows

VOCAB, POSITION = 200, 30
CASES = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 20, "top_p": 0.6},
    {"top_k": 64, "min_p": 0.2},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.05},
]


@pytest.fixture
def state(device):
    """Five requests of three rows each, one that filters nothing, and the logits of their rows."""
    count = torch.int32
    rows = Rows(
        torch.tensor([16], dtype=count, device=device),
        torch.tensor([6], dtype=count, device=device),
        torch.tensor([0, 3, 6, 9, 12, 15] + [0] * 10, dtype=count, device=device),
        torch.tensor([3] * 5 + [1] + [0] * 10, dtype=count, device=device),
        torch.tensor([r // 3 for r in range(16)], dtype=count, device=device),
        torch.tensor([POSITION + r % 3 for r in range(16)], dtype=count, device=device),
    )
    logits = torch.randn(16, VOCAB, generator=torch.Generator().manual_seed(3)) * 2
    return rows, logits.to(device)


def filters_of(device):
    given = [*CASES, {}]
    fill = [0] * 10
    return Filters(
        torch.tensor([c.get("top_k", 0) for c in given] + fill, dtype=torch.int32, device=device),
        torch.tensor([c.get("top_p", 1.0) for c in given] + fill, dtype=torch.float32, device=device),
        torch.tensor(
            [math.log(c["min_p"]) if "min_p" in c else -math.inf for c in given] + fill, device=device
        ),
    )


def run(state, device, **options):
    rows, logits = state
    tokens = torch.full((16,), 777, dtype=torch.int32, device=device)
    seeds = torch.tensor([r // 3 + 100 for r in range(16)], dtype=torch.int64, device=device)
    temperatures = torch.full((16,), 0.7, device=device)
    choose_filtered(
        logits,
        tokens,
        filters_of(device),
        seeds,
        temperatures,
        rows,
        Launch(),
        position_offset=1,
        **options,
    )
    return tokens.tolist()


def test_tokens_are_those_of_the_host(state, device):
    tokens = run(state, device)
    noise = NoiseCache(VOCAB)
    for r, case in enumerate(CASES):
        params = SamplingParams(temperature=0.7, **case)
        request = SamplingRequest(params, [1] * (POSITION + 1), seed=100 + r, vocab_size=VOCAB)
        block = RowBlock(request, (-1, -1))
        expected = sample_rows(state[1][3 * r : 3 * r + 3].cpu(), [block], noise).token_ids[0]
        assert tokens[3 * r : 3 * r + 3] == expected, case
    assert tokens[15] == 777


def test_an_anchor_is_not_for_the_drafter_to_choose(state, device):
    chosen, drafted = run(state, device), run(state, device, is_draft=True)
    for r in range(5):
        assert drafted[3 * r] == 777
        assert drafted[3 * r + 1 : 3 * r + 3] == chosen[3 * r + 1 : 3 * r + 3]
