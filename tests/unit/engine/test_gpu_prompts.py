"""A prompt's chunk through the chunk kernels leaves what the decode kernels leave, 16 rows at a time."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; it comes with PyTorch's CUDA builds")

from lean_laguna.core.types import SamplingParams
from lean_laguna.engine.gpu_prompts import ChunkPrompts, RowPrompts
from support.gpu import toy_engine

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="toy shapes are for the interpreter")


def test_both_ways_leave_the_same_keys_context_and_hidden_states():
    engine = toy_engine(3)
    programs = engine.programs
    engine.add_request(list(range(30, 38)), SamplingParams(max_tokens=2))
    (chunk,) = engine.scheduler.schedule().prefill
    sequence = chunk.sequence
    engine.scheduler.prepare(sequence, 8)
    tokens = sequence.request.prompt_token_ids[:8]
    used = [i for i, group in enumerate(programs.pools.groups) if group.num_layers]
    found = []
    for prompts in (RowPrompts(programs, engine._lanes), ChunkPrompts(programs, used, 8)):
        for group in used:
            for pool in programs.pools.group(group):
                pool.zero_()
        hidden = prompts.compute(sequence, 0, tokens, wants_all=True).clone()
        last = prompts.compute(sequence, 0, tokens, wants_all=False)
        torch.testing.assert_close(last, hidden[-1:], rtol=1e-5, atol=1e-5)
        # Block 0 is nobody's.
        pages = [pool[:, 1:].clone() for group in used for pool in programs.pools.group(group)]
        found.append((hidden, *pages))
    assert any(page.any() for page in found[0][1:])
    for by_rows, by_chunk in zip(*found, strict=True):
        torch.testing.assert_close(by_rows, by_chunk, rtol=1e-4, atol=1e-4)
