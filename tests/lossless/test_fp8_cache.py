"""With keys and values kept in FP8, a drafter, neighbours, chunks and cached prompts still change nothing."""

import copy
import functools

import pytest
import torch

from lean_laguna.core.config import EngineConfig
from lean_laguna.core.types import SamplingParams
from lean_laguna.engine.llm_engine import LLMEngine
from support.engines import (
    PROPOSERS,
    assert_nothing_held,
    complete,
    outcome,
    run_all,
    scripts_of,
    tiny_target,
    tiny_tokenizer,
    tokens_of,
)


@functools.cache
def scaled_target():
    """The tiny target with scales of its own for every layer's cache."""
    target = copy.deepcopy(tiny_target())
    target.unpack()
    target.kv_scales = {
        f"model.layers.{i}.self_attn.{kind}_scale": 0.004 * (i + 1) * (1 if kind == "k" else 3)
        for i in range(4)
        for kind in "kv"
    }
    return target


def engine_of(proposer=None, k=None, **options):
    config = EngineConfig(
        **{"prefill_chunk_size": 8, "kv_block_size": 4, "max_num_seqs": 8, "seed": 0, **options},
        kv_cache_dtype="fp8",
    )
    return LLMEngine(scaled_target(), tiny_tokenizer(), proposer, config, num_speculative_tokens=k)


def params(i, max_tokens=24):
    temperature = 0.0 if i % 2 else 0.9
    return SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True, seed=i, logprobs=2)


@functools.cache
def plain(i, length):
    return complete(engine_of(enable_prefix_caching=False), tokens_of(i, length), params(i))


@pytest.mark.parametrize("drafter", ["mixed", "dflash", "dspark"])
@pytest.mark.parametrize("k", [1, 3, 7, 15])
def test_a_drafter_changes_nothing(drafter, k):
    for i in (0, 1):
        expected = plain(i, 19)
        engine = engine_of(PROPOSERS[drafter](scripts_of(expected)), k)
        assert outcome(complete(engine, tokens_of(i, 19), params(i))) == outcome(expected)
        assert_nothing_held(engine)


def test_neighbours_chunks_and_cached_prompts_change_nothing():
    wanted = [(i, 7 + 5 * i) for i in range(5)]
    expected = [plain(*request) for request in wanted]
    engine = engine_of(PROPOSERS["dflash"]({}), 5, prefill_chunk_size=16)
    for _ in range(2):  # the second time from cached prompts
        states = [engine.add_request(tokens_of(i, length), params(i)) for i, length in wanted]
        run_all(engine)
        assert [outcome(state.snapshot()) for state in states] == [outcome(output) for output in expected]
    assert_nothing_held(engine)


def test_the_cache_takes_a_quarter_of_float32_and_its_codes_count():
    engine = engine_of()
    cache = engine._runner.kv_cache
    assert {cache.dtype_of(group) for group in range(2)} == {torch.float8_e4m3fn}
    whole = LLMEngine(
        scaled_target(), tiny_tokenizer(), None, EngineConfig(prefill_chunk_size=8, kv_block_size=4)
    )
    per_block = [group.block_bytes(4, torch.float32) for group in cache.groups]
    assert [4 * size for size in per_block] == [
        group.block_bytes(4, torch.float32) for group in whole._runner.kv_cache.groups
    ]
    unlike = complete(whole, tokens_of(0, 19), params(0)).outputs[0].logprobs
    assert plain(0, 19).outputs[0].logprobs != unlike


def test_a_drafters_own_pages_are_not_rounded():
    engine = engine_of(PROPOSERS["dflash"]({}), 3)
    cache = engine._runner.kv_cache
    assert [cache.dtype_of(i) for i in range(len(cache.groups))] == [torch.float8_e4m3fn] * 2 + [
        torch.float32
    ] * (len(cache.groups) - 2)
