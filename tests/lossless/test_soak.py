"""Requests that join, leave and are aborted at random: every one gets its own output, and nothing leaks."""

import random

import pytest

from lean_laguna.core.types import SamplingParams
from support.engines import (
    PROPOSERS,
    VOCAB,
    assert_nothing_held,
    make_engine,
    outcome,
    plain,
    tokens_of,
)


def random_request(rng):
    prompt = tokens_of(rng.randrange(3), rng.choice([0, 8, 16, 24])) + tokens_of(
        rng.randrange(100, 110), rng.randint(1, 12)
    )
    params = SamplingParams(
        n=rng.choice([1, 1, 1, 2]),
        temperature=rng.choice([0.0, 0.7, 1.2]),
        top_k=rng.choice([0, 0, 20]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
        max_tokens=rng.randint(1, 24),
        stop_token_ids=[rng.randrange(VOCAB) for _ in range(rng.choice([0, 6]))],
        stop=rng.choice([[], ["e"], [" a", "th"]]),
        ignore_eos=rng.random() < 0.7,
        logprobs=rng.choice([None, None, 1]),
        seed=rng.randrange(5),
    )
    return prompt, params


def soak(seed, num_requests, drafter, length):
    rng = random.Random(seed)
    engine = make_engine(
        PROPOSERS[drafter]({}),
        length,
        max_num_seqs=rng.choice([2, 5, 8]),
        max_model_len=rng.choice([64, 128]),
    )
    waiting, finished, num_aborted = [], [], 0
    for _ in range(num_requests):
        request = random_request(rng)
        override = rng.choice([None, None, 0, 2])
        waiting.append((request, engine.add_request(*request, num_speculative_tokens=override)))
        for _ in range(rng.randrange(5)):
            engine.step()
        if rng.random() < 0.15:
            victim = rng.choice(waiting)
            num_aborted += engine.abort(victim[1].request_id)
        finished += [entry for entry in waiting if entry[1].is_finished]
        waiting = [entry for entry in waiting if not entry[1].is_finished]
    while engine.has_unfinished:
        engine.step()
    finished += waiting
    assert len(finished) == num_requests
    for request, state in finished:
        output = state.snapshot()
        expected = plain(*request)
        for completion, whole in zip(output.outputs, expected.outputs, strict=True):
            if completion.finish_reason == "abort":
                assert completion.token_ids == whole.token_ids[: len(completion.token_ids)]
            else:
                assert completion.token_ids == whole.token_ids
                assert completion.text == whole.text
                assert completion.logprobs == whole.logprobs
                assert (completion.finish_reason, completion.stop_reason) == (
                    whole.finish_reason,
                    whole.stop_reason,
                )
        if all(completion.finish_reason != "abort" for completion in output.outputs):
            assert outcome(output) == outcome(expected)
    stats = engine.stats()
    assert stats.num_requests == stats.num_finished_requests == num_requests
    assert num_aborted <= num_requests
    assert_nothing_held(engine)


@pytest.mark.parametrize("length", [3, "auto"])
def test_short_soak(length):
    soak(0, 25, "dflash", length)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("length", [7, "auto"])
def test_long_soak(seed, length):
    soak(100 + seed, 400, "dflash", length)
