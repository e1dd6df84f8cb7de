import re

import pytest

from lean_laguna.core.errors import ConfigError, RequestError
from lean_laguna.core.types import SamplingParams
from support.engines import (
    EOS,
    MAX_POSITIONS,
    PROPOSERS,
    VOCAB,
    assert_nothing_held,
    complete,
    make_engine,
    plain,
    run_all,
    scripts_of,
    tokens_of,
)

PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, seed=0)


def test_too_long_a_request_is_refused_at_once_with_both_numbers():
    engine = make_engine(max_model_len=32)
    with pytest.raises(RequestError, match=r"limit is 32 .* needs 42: 32 .* 10 ") as refused:
        engine.add_request(tokens_of(0, 32), PARAMS)
    assert refused.value.code == "context_length_exceeded"
    assert refused.value.param == "prompt"
    with pytest.raises(RequestError, match=r"limit is 32 .* needs 33: 23 .* 10 ") as refused:
        engine.add_request(tokens_of(0, 23), PARAMS)
    assert refused.value.param == "max_tokens"
    assert not engine.has_unfinished


def test_request_that_just_fits_is_served_whole():
    engine = make_engine(max_model_len=32)
    assert len(complete(engine, tokens_of(0, 22), PARAMS).outputs[0].token_ids) == 10
    no_limit = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    assert len(complete(engine, tokens_of(0, 31), no_limit).outputs[0].token_ids) == 1
    with pytest.raises(RequestError, match="needs 33: 32 in the prompt and 1"):
        engine.add_request(tokens_of(0, 32), no_limit)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty"),
        ([5, VOCAB], f"prompt token id {VOCAB} is not in the vocabulary (0 to {VOCAB - 1})"),
        ([-1, 5], "prompt token id -1 is not in the vocabulary"),
    ],
)
def test_unusable_prompt_is_refused(prompt, message):
    with pytest.raises(RequestError, match=re.escape(message)):
        make_engine().add_request(prompt, PARAMS)


def test_a_stop_token_beyond_the_vocabulary_is_refused():
    params = SamplingParams(max_tokens=4, stop_token_ids=[3, VOCAB])
    with pytest.raises(RequestError, match=rf"stop_token_ids: {VOCAB} is not in the vocabulary"):
        make_engine().add_request([5], params)


def test_taken_request_id_is_refused_and_free_again_afterwards():
    engine = make_engine()
    engine.add_request([30], PARAMS, request_id="a")
    with pytest.raises(RequestError, match="request id 'a'"):
        engine.add_request([30], PARAMS, request_id="a")
    run_all(engine)
    assert complete(engine, [30], PARAMS, request_id="a").request_id == "a"


def test_made_request_ids_avoid_taken_ones():
    engine = make_engine()
    engine.add_request([30], PARAMS, request_id="request-0")
    assert engine.add_request([30], PARAMS).request_id == "request-1"


def test_draft_length_beyond_the_drafter_is_refused():
    engine = make_engine(PROPOSERS["oracle"]({}), 3)
    with pytest.raises(RequestError, match="must be 0 to 15 for this drafter, found 16"):
        engine.add_request([30], PARAMS, num_speculative_tokens=16)
    with pytest.raises(RequestError, match="no drafter is loaded"):
        make_engine().add_request([30], PARAMS, num_speculative_tokens=1)
    assert complete(make_engine(), [30], PARAMS, num_speculative_tokens=0).finished
    with pytest.raises(ConfigError, match="must be 0 to 15"):
        make_engine(PROPOSERS["oracle"]({}), 16)


def test_context_beyond_the_checkpoint_is_refused():
    with pytest.raises(ConfigError, match=f"at most .*{MAX_POSITIONS}, found {MAX_POSITIONS + 1}"):
        make_engine(max_model_len=MAX_POSITIONS + 1)


def test_too_little_kv_memory_is_refused_with_the_length_that_fits():
    with pytest.raises(ConfigError, match="largest max_model_len that fits is") as refused:
        make_engine(kv_cache_memory_bytes=60_000)
    fits = int(str(refused.value).rpartition(" ")[2])
    assert complete(make_engine(kv_cache_memory_bytes=60_000, max_model_len=fits), [30], PARAMS).finished


@pytest.mark.parametrize("num_steps", range(8))
@pytest.mark.parametrize("drafter", [None, "dflash"])
def test_abort_at_any_time_frees_everything_at_once(num_steps, drafter):
    engine = make_engine(PROPOSERS[drafter]({}) if drafter else None, 3 if drafter else None)
    state = engine.add_request(tokens_of(0, 30), SamplingParams(n=2, max_tokens=40, ignore_eos=True, seed=0))
    for _ in range(num_steps):
        engine.step()
    assert engine.abort(state.request_id)
    assert not engine.has_unfinished
    assert all(pool.num_in_use == 0 for pool in engine.scheduler.pools)
    output = state.snapshot()
    assert output.finished
    assert [c.finish_reason for c in output.outputs] == ["abort", "abort"]
    whole = plain(tokens_of(0, 30), SamplingParams(n=2, max_tokens=40, ignore_eos=True, seed=0))
    for completion, expected in zip(output.outputs, whole.outputs, strict=True):
        assert completion.token_ids == expected.token_ids[: len(completion.token_ids)]
    assert_nothing_held(engine)


def test_abort_of_an_unknown_or_finished_request_does_nothing():
    engine = make_engine()
    output = complete(engine, [30], PARAMS)
    assert not engine.abort(output.request_id)
    assert not engine.abort("never was")
    assert engine.stats().num_finished_requests == 1


def test_abort_leaves_the_neighbours_alone():
    engine = make_engine(PROPOSERS["dflash"]({}), 3)
    victim = engine.add_request(tokens_of(0, 30), PARAMS)
    other = engine.add_request(tokens_of(1, 30), PARAMS)
    for _ in range(5):
        engine.step()
    engine.abort(victim.request_id)
    run_all(engine)
    assert other.snapshot().outputs[0].token_ids == plain(tokens_of(1, 30), PARAMS).outputs[0].token_ids


def test_step_without_work_returns_nothing():
    assert make_engine().step() == []


def test_step_computes_prompts_beside_decoding_sequences():
    engine = make_engine()
    engine.add_request(tokens_of(0, 5), PARAMS, request_id="first")
    engine.step()
    engine.add_request(tokens_of(1, 5), PARAMS, request_id="second")
    assert [delta.request_id for delta in engine.step()] == ["second", "first"]


def test_statistics_add_up():
    expected = [plain(tokens_of(i, 20), PARAMS) for i in range(3)]
    seeded = [SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, seed=i) for i in range(3)]
    scripts = {i: output.outputs[0].token_ids for i, output in enumerate(expected)}
    engine = make_engine(PROPOSERS["mixed"](scripts), 3)
    states = [engine.add_request(tokens_of(i, 20), seeded[i]) for i in range(3)]
    engine.step()
    running = engine.stats()
    assert running.num_running == 3
    assert 0 < running.kv_usage["full"] < 1
    run_all(engine)
    stats = engine.stats()
    assert stats.num_requests == stats.num_finished_requests == 3
    assert stats.num_generated_tokens == 30
    assert stats.num_prompt_tokens == 60
    assert stats.num_running == stats.num_waiting == 0
    assert set(stats.kv_usage) == {"full", "sliding"}
    assert stats.decode_s > 0
    assert stats.prefill_s > 0
    counts = [state.snapshot().outputs[0].speculation for state in states]
    assert stats.speculation == counts[0] + counts[1] + counts[2]
    assert stats.draft_length_reason == "draft length 3: fixed by num_speculative_tokens"
    assert make_engine().stats().draft_length_reason is None


def test_accepted_drafts_are_marked_token_by_token():
    expected = plain(tokens_of(0, 9), PARAMS)
    engine = make_engine(PROPOSERS["oracle"](scripts_of(expected)), 3)
    completion = complete(engine, tokens_of(0, 9), PARAMS).outputs[0]
    # The prefill's own token, then blocks of three drafts and one bonus token, the last cut by the limit.
    assert completion.is_draft_token == (False, *[True, True, True, False] * 2, False)


def test_times_are_in_order():
    times = complete(make_engine(), tokens_of(0, 9), PARAMS).times
    assert times.arrival_s < times.first_token_s < times.last_token_s


def test_end_of_sequence_is_in_the_tokens_and_not_in_the_text():
    params = SamplingParams(temperature=0, max_tokens=10, logit_bias={EOS: 100.0}, skip_special_tokens=False)
    completion = complete(make_engine(), tokens_of(0, 9), params).outputs[0]
    assert completion.token_ids == (EOS,)
    assert completion.text == ""
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)


def test_engine_seed_makes_unseeded_requests_reproducible():
    params = SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True)
    seeds = [complete(make_engine(seed=3), [30], params).outputs[0].seed for _ in range(2)]
    assert seeds[0] == seeds[1]
    assert seeds[0] != complete(make_engine(seed=4), [30], params).outputs[0].seed


@pytest.mark.parametrize("max_num_seqs", [1, 2, 15, 16, 17])
def test_burst_at_and_beyond_the_limit_is_served(max_num_seqs):
    engine = make_engine(PROPOSERS["dflash"]({}), 15, max_num_seqs=max_num_seqs, max_model_len=32)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    states = [engine.add_request(tokens_of(i, 5), params) for i in range(2 * max_num_seqs)]
    run_all(engine)
    assert all(len(state.snapshot().outputs[0].token_ids) == 4 for state in states)
    assert_nothing_held(engine)


def test_sliding_layers_keep_only_their_window():
    engine = make_engine(PROPOSERS["dflash"]({}), 3)
    state = engine.add_request(
        tokens_of(0, 100), SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    )
    most = 0
    while engine.has_unfinished:
        engine.step()
        tables = dict(zip((g.name for g in engine.scheduler.groups), state.sequences[0].tables, strict=False))
        if tables:
            assert tables["full"].num_held == 40
            most = max(most, tables["sliding"].num_held)
            assert tables["draft_sliding"].num_held == tables["sliding"].num_held
    # 7 keys before the chunk and 8 rows touch at most 5 pages of 4.
    assert most <= 5
