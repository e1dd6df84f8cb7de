"""A prompt's chunk through the chunk kernels leaves what the decode kernels leave, 16 rows at a time."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; it comes with PyTorch's CUDA builds")

from lean_laguna.core.types import SamplingParams
from lean_laguna.engine.gpu_prompts import ChunkPrompts, RowPrompts
from support.gpu import toy_engine

pytestmark = pytest.mark.interpreted


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
    limits = engine.scheduler.limits
    for prompts in (RowPrompts(programs, engine._lanes), ChunkPrompts(programs, used, limits, 64)):
        prompts.note_pages(sequence, is_first=True)
        for run in prompts.dry_runs():  # on nobody's page
            run()
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


def prompts_at_once(rows):
    """Serve a prompt, then one that shares 16 tokens with it, ``rows`` prompt tokens a step at most."""
    engine = toy_engine(3, prefill_chunk_size=8)
    used = [i for i, group in enumerate(engine.programs.pools.groups) if group.num_layers]
    engine.scheduler.limits = dataclasses.replace(engine.scheduler.limits, prefill_rows=rows)
    engine._prompts = ChunkPrompts(engine.programs, used, engine.scheduler.limits, 64)
    logits, steps, states = [], [], []
    engine.watch_logits(lambda sequence, found: logits.append(found.clone()))
    for prompt in (list(range(40, 69)), [*range(40, 56), 7, 8, 9]):
        states.append(engine.add_request(prompt, SamplingParams(max_tokens=2, temperature=0)))
        while engine.has_unfinished:
            steps.append([(c.start, c.end) for c in engine.scheduler.schedule().prefill])
            engine.step()
    (first,), (second,) = (state.sequences for state in states)
    assert second.num_cached_tokens == 16
    counts = [sequence.speculation.stats() for sequence in (first, second)]
    return torch.cat(logits), [first.completion.token_ids, second.completion.token_ids], counts, steps


def test_several_chunks_of_a_prompt_in_one_step_leave_what_one_after_another_leaves():
    apart, together = prompts_at_once(8), prompts_at_once(24)
    assert together[3][:2] == [[(0, 8), (8, 16), (16, 24)], [(24, 29)]]
    assert apart[3][:2] == [[(0, 8)], [(8, 16)]]
    assert torch.equal(apart[0], together[0])
    assert apart[1:3] == together[1:3]
