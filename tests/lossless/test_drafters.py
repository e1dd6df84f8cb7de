"""Any drafter, any draft length: the output is that of plain decoding, bit for bit."""

import copy
import dataclasses
import itertools

import pytest
import torch

from lean_laguna.core.config import EngineConfig
from lean_laguna.core.types import SamplingParams
from lean_laguna.engine.llm_engine import LLMEngine
from lean_laguna.spec.proposer import DFlashProposer
from support.engines import (
    PROPOSERS,
    SCRIPTED,
    WINDOW,
    assert_nothing_held,
    complete,
    dflash,
    make_engine,
    outcome,
    plain,
    scripts_of,
    tiny_drafter,
    tiny_target,
    tiny_tokenizer,
    tokens_of,
)

LENGTHS = [0, 1, 3, 7, 15]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, seed=1, logprobs=3)
SAMPLED = SamplingParams(temperature=0.9, max_tokens=40, ignore_eos=True, seed=2, logprobs=3)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("length", [*LENGTHS, "auto"])
@pytest.mark.parametrize("drafter", PROPOSERS)
def test_output_is_that_of_plain_decoding(drafter, length, params):
    prompt = tokens_of(0, 13)
    expected = plain(prompt, params)
    engine = make_engine(PROPOSERS[drafter](scripts_of(expected)), length)
    assert outcome(complete(engine, prompt, params)) == outcome(expected)
    assert_nothing_held(engine)


@pytest.mark.parametrize("length", [3, 15])
@pytest.mark.parametrize("num_prompt_tokens", [1, *range(WINDOW - 2, WINDOW + 3), 15, 16, 17, 33])
def test_window_edge_is_crossed_alike(num_prompt_tokens, length):
    prompt = tokens_of(num_prompt_tokens, num_prompt_tokens)
    expected = plain(prompt, SAMPLED)
    for drafter in ("mixed", "dflash"):
        engine = make_engine(PROPOSERS[drafter](scripts_of(expected)), length)
        assert outcome(complete(engine, prompt, SAMPLED)) == outcome(expected)


def test_long_output_far_beyond_the_window_is_alike():
    params = SamplingParams(temperature=0.7, max_tokens=200, ignore_eos=True, seed=5)
    prompt = tokens_of(5, 50)
    expected = plain(prompt, params)
    for drafter in ("oracle", "mixed", "dflash"):
        engine = make_engine(PROPOSERS[drafter](scripts_of(expected)), 7)
        assert outcome(complete(engine, prompt, params)) == outcome(expected)


@pytest.mark.parametrize("drafter", ["oracle", "dflash"])
def test_last_position_of_the_context_is_reached_alike(drafter):
    params = SamplingParams(temperature=0.7, max_tokens=None, ignore_eos=True, seed=5)
    prompt = tokens_of(6, 21)
    expected = complete(make_engine(max_model_len=64), prompt, params)
    assert len(expected.outputs[0].token_ids) == 43
    assert expected.outputs[0].finish_reason == "length"
    engine = make_engine(PROPOSERS[drafter](scripts_of(expected)), 15, max_model_len=64)
    assert outcome(complete(engine, prompt, params)) == outcome(expected)


def test_oracle_is_accepted_whole_and_never_is_never():
    expected = plain(tokens_of(0, 13), GREEDY)
    results = {}
    for name in ("oracle", "never"):
        engine = make_engine(SCRIPTED[name](scripts_of(expected)), 7)
        results[name] = complete(engine, tokens_of(0, 13), GREEDY).outputs[0].speculation
    oracle, never = results["oracle"], results["never"]
    # 39 tokens follow the prefill's: 4 steps of 8, and 7 in the last.
    assert (oracle.num_steps, oracle.num_accepted_tokens, oracle.num_draft_tokens) == (5, 34, 34)
    assert (never.num_steps, never.num_accepted_tokens) == (39, 0)
    assert never.mean_acceptance_length == 1.0


def test_drafter_with_a_position_limit_stops_drafting_and_serving_goes_on():
    expected = plain(tokens_of(0, 13), GREEDY)
    proposer = SCRIPTED["short"](scripts_of(expected))
    output = complete(make_engine(proposer, 7), tokens_of(0, 13), GREEDY)
    assert outcome(output) == outcome(expected)
    completion = output.outputs[0]
    first_drafted = completion.is_draft_token.index(True)
    drafted_positions = [13 + i for i, is_draft in enumerate(completion.is_draft_token) if is_draft]
    assert first_drafted < 3
    assert max(drafted_positions) < 30


@pytest.mark.parametrize("num_prompt_tokens", [5, 33, 40, 47, 70])
def test_dflash_drafter_shorter_than_the_context_stops_drafting_and_serving_goes_on(num_prompt_tokens):
    prompt = tokens_of(2, num_prompt_tokens)
    params = dataclasses.replace(SAMPLED, max_tokens=60)
    proposer = DFlashProposer(tiny_drafter(max_position_embeddings=40), tiny_target())
    engine = make_engine(proposer, 7)
    for _ in range(2):  # the second time from the prefix cache
        output = complete(engine, prompt, params)
        assert outcome(output) == outcome(plain(prompt, params))
        drafted = [
            num_prompt_tokens + i for i, is_draft in enumerate(output.outputs[0].is_draft_token) if is_draft
        ]
        assert all(position < 40 for position in drafted)
        assert bool(drafted) == (num_prompt_tokens < 40)


def test_no_more_is_drafted_than_can_be_emitted():
    expected = plain(tokens_of(0, 13), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, seed=1))
    proposer = SCRIPTED["never"](scripts_of(expected))
    complete(
        make_engine(proposer, 15),
        tokens_of(0, 13),
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, seed=1),
    )
    assert proposer.asked == [4, 3, 2, 1]


@pytest.mark.parametrize("drafter", ["never", "mixed", "dflash"])
def test_rejected_tail_leaves_no_trace_in_the_kv_cache(drafter):
    prompt = tokens_of(0, 13)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, seed=1)
    expected = plain(prompt, params)
    caches = []
    for proposer in (None, PROPOSERS[drafter](scripts_of(expected))):
        engine = make_engine(proposer, 7, enable_prefix_caching=False)
        state = engine.add_request(prompt, params)
        while len(state.sequences[0].completion.token_ids) < 20:
            engine.step()
        caches.append(_kv_of(engine, state.sequences[0], 13 + 19))
    for plain_kv, kv in zip(*caches, strict=True):
        assert torch.equal(plain_kv, kv)


def _kv_of(engine, sequence, num_positions):
    """Keys and values of the target's layers at the first positions, those still kept."""
    found = []
    cache = engine._runner.kv_cache
    for group, table in zip(engine._runner._group_ids[:2], sequence.tables, strict=False):
        first = 0 if table.window is None else num_positions - table.window + 1
        entries = table.as_tuple()
        for layer in range(cache.groups[group].num_layers):
            pages = cache.storage(group, layer)
            rows = [pages[entries[p // 4], p % 4] for p in range(first, num_positions)]
            found.append(torch.stack(rows))
    return found


class Recorder:
    """A DFlash proposer that notes what it drafted, and after how many output tokens."""

    def __init__(self):
        self._inner = dflash()
        self.drafts = {}

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def propose(self, requests, kv_cache, noise):
        found = self._inner.propose(requests, kv_cache, noise)
        for wanted, drafts in zip(requests, found, strict=True):
            self.drafts[len(wanted.request.output_token_ids)] = drafts
        return found


def drafts_anew(prompt, said, length, params):
    """Return what is drafted after ``said`` when all but its last token come as a prompt."""
    fresh = Recorder()
    engine = make_engine(fresh, length)
    engine.add_request([*prompt, *said[:-1]], params)
    while not fresh.drafts:
        engine.step()
    return fresh.drafts[1]


class OnAndOff:
    """A controller that turns drafting off for stretches of any length."""

    lengths = itertools.cycle([7, 0, 7, *[0] * 5, 3, *[0] * 20, 7])
    schedule = None
    is_fixed = True

    def choose(self, batch, context_len, *, may_schedule):
        return next(self.lengths)

    def observe(self, *args, **kwargs):
        pass


@pytest.mark.parametrize("num_prompt_tokens", [3, 8, 20])
def test_drafts_after_a_stretch_without_drafting_are_those_from_a_context_computed_anew(num_prompt_tokens):
    prompt = tokens_of(1, num_prompt_tokens)
    params = dataclasses.replace(SAMPLED, max_tokens=90)
    running = Recorder()
    engine = make_engine(running, 7)
    engine._draft_lengths.controller = OnAndOff()
    output = complete(engine, prompt, params).outputs[0]
    assert outcome(complete(make_engine(), prompt, params))[0][:2] == (output.token_ids, output.text)
    assert len(running.drafts) > 6
    for num_said, drafts in running.drafts.items():
        assert drafts == drafts_anew(prompt, output.token_ids[:num_said], len(drafts), params)


@pytest.mark.parametrize("num_prompt_tokens", [3, 8, 20])
def test_drafts_after_any_rounds_are_those_from_a_context_computed_anew(num_prompt_tokens):
    """So the drafter's context is right across rounds, rejections, page and window edges."""
    prompt = tokens_of(1, num_prompt_tokens)
    running = Recorder()
    output = complete(make_engine(running, 7), prompt, SAMPLED).outputs[0]
    assert 0 < output.speculation.num_accepted_tokens < output.speculation.num_draft_tokens
    assert len(running.drafts) > 5
    for num_said, drafts in running.drafts.items():
        assert drafts == drafts_anew(prompt, output.token_ids[:num_said], len(drafts), SAMPLED)


@pytest.mark.parametrize("drafter", [None, "mixed", "dflash"])
def test_unwritten_pages_are_never_read(drafter):
    prompt = tokens_of(3, 29)
    expected = plain(prompt, SAMPLED)
    proposer = None if drafter is None else PROPOSERS[drafter](scripts_of(expected))
    engine = make_engine(proposer, None if drafter is None else 7)
    cache = engine._runner.kv_cache
    for group, kv_group in enumerate(cache.groups):
        for layer in range(kv_group.num_layers):
            cache.storage(group, layer)[1:] = torch.nan
    assert outcome(complete(engine, prompt, SAMPLED)) == outcome(expected)


def test_bfloat16_is_lossless_too():
    target = copy.deepcopy(tiny_target()).to(torch.bfloat16)
    drafter = copy.deepcopy(tiny_drafter()).to(torch.bfloat16)
    config = EngineConfig(prefill_chunk_size=8, kv_block_size=4, seed=0)
    for params in (GREEDY, SAMPLED):
        plainly = complete(LLMEngine(target, tiny_tokenizer(), None, config), tokens_of(0, 13), params)
        for proposer in (SCRIPTED["mixed"](scripts_of(plainly)), DFlashProposer(drafter, target)):
            engine = LLMEngine(target, tiny_tokenizer(), proposer, config, num_speculative_tokens=7)
            assert outcome(complete(engine, tokens_of(0, 13), params)) == outcome(plainly)


def test_threads_are_lossless_too():
    params = dataclasses.replace(SAMPLED, max_tokens=12)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        plainly = complete(make_engine(), tokens_of(0, 13), params)
        assert outcome(complete(make_engine(dflash(), 7), tokens_of(0, 13), params)) == outcome(plainly)
    finally:
        torch.set_num_threads(before)
