"""A cached prompt gives the same output and the same acceptance as one computed anew."""

import pytest

from lean_laguna.core.types import SamplingParams
from lean_laguna.engine.llm_engine import LLMEngine
from lean_laguna.spec.proposer import DFlashProposer
from support.engines import (
    PROPOSERS,
    assert_nothing_held,
    complete,
    make_engine,
    outcome,
    plain,
    run_all,
    tiny_drafter,
    tiny_target,
    tokens_of,
)

PARAMS = SamplingParams(temperature=0.9, max_tokens=40, ignore_eos=True, seed=4, logprobs=2)


def dflash_engine(layers="SF", **options) -> LLMEngine:
    return make_engine(DFlashProposer(tiny_drafter(layers=layers), tiny_target()), 7, **options)


@pytest.mark.parametrize("layers", ["S", "F", "SF"])
@pytest.mark.parametrize("num_prompt_tokens", [9, 16, 17, 33, 60])
def test_repeated_prompt_gives_the_same_output_and_acceptance(num_prompt_tokens, layers):
    prompt = tokens_of(8, num_prompt_tokens)
    engine = dflash_engine(layers)
    first, second = complete(engine, prompt, PARAMS), complete(engine, prompt, PARAMS)
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == (num_prompt_tokens - 1) // 8 * 8
    assert outcome(first) == outcome(second) == outcome(plain(prompt, PARAMS))
    assert first.outputs[0].speculation == second.outputs[0].speculation
    assert first.outputs[0].speculation.num_accepted_tokens > 3
    assert_nothing_held(engine)


def test_longer_prompt_after_a_cached_one_accepts_as_without_the_cache():
    shared = tokens_of(8, 40)
    prompt = shared + tokens_of(9, 21)
    fresh = complete(dflash_engine(enable_prefix_caching=False), prompt, PARAMS)
    engine = dflash_engine()
    complete(engine, shared + tokens_of(10, 5), PARAMS)
    cached = complete(engine, prompt, PARAMS)
    assert cached.num_cached_tokens == 40
    assert outcome(cached) == outcome(fresh)
    assert cached.outputs[0].speculation == fresh.outputs[0].speculation


def test_prompt_cached_by_a_request_without_drafts_serves_one_with_drafts():
    prompt = tokens_of(8, 40)
    fresh = complete(dflash_engine(enable_prefix_caching=False), prompt, PARAMS)
    engine = dflash_engine()
    complete(engine, prompt, PARAMS, num_speculative_tokens=0)
    cached = complete(engine, prompt, PARAMS)
    assert cached.num_cached_tokens == 32
    assert cached.outputs[0].speculation == fresh.outputs[0].speculation


def test_conversation_that_grows_continues_from_its_last_turn():
    engine = dflash_engine(max_num_seqs=1)
    prompt = tokens_of(8, 11)
    for turn in range(6):
        output = complete(engine, prompt, PARAMS)
        assert outcome(output) == outcome(plain(prompt, PARAMS))
        if turn:
            assert output.num_cached_tokens >= len(prompt) - 40 - 19
        prompt = [*prompt, *output.outputs[0].token_ids[:10], *tokens_of(turn, 9)]
    assert_nothing_held(engine)


def test_cache_under_pressure_changes_nothing():
    """Room for two long requests: cached prompts are evicted all the time, whole or in part."""
    engine = dflash_engine(max_model_len=64, max_num_seqs=2)
    prompts = [tokens_of(i, 20) + tokens_of(j, 12) for i in range(3) for j in range(3)]
    request = SamplingParams(temperature=0.9, max_tokens=16, ignore_eos=True, seed=4)
    expected = [outcome(plain(prompt, request)) for prompt in prompts]
    for _ in range(2):
        states = [engine.add_request(prompt, request) for prompt in prompts]
        run_all(engine)
        assert [outcome(state.snapshot()) for state in states] == expected
    assert engine.stats().num_cached_prompt_tokens > 0
    assert_nothing_held(engine)


def test_completions_of_one_prompt_share_it():
    prompt = tokens_of(8, 40)
    engine = dflash_engine()
    request = SamplingParams(n=3, temperature=0.9, max_tokens=10, ignore_eos=True, seed=4)
    complete(engine, prompt, request)
    stats = engine.stats()
    assert stats.num_prompt_tokens == 120
    assert stats.num_cached_prompt_tokens == 64
    assert stats.prefix_cache_hit_rate == pytest.approx(64 / 120)


def test_prompt_logprobs_are_the_same_with_a_warm_cache():
    prompt = tokens_of(8, 40)
    request = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=1, seed=0)
    engine = make_engine(PROPOSERS["dflash"]({}), 3)
    first, second = complete(engine, prompt, request), complete(engine, prompt, request)
    assert outcome(first) == outcome(second) == outcome(plain(prompt, request))
