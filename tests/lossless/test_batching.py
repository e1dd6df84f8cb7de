"""Neighbours, chunk sizes, completions beside each other and order of arrival change no output."""

import random

import pytest

from lean_laguna.core.types import SamplingParams
from lean_laguna.spec.noise import derive_seed
from support.engines import (
    PROPOSERS,
    assert_nothing_held,
    complete,
    make_engine,
    outcome,
    plain,
    run_all,
    scripts_of,
    tokens_of,
)


def params(i, max_tokens=20):
    return SamplingParams(
        temperature=0.0 if i % 2 else 0.9, max_tokens=max_tokens, ignore_eos=True, seed=i, logprobs=2
    )


@pytest.mark.parametrize("drafter", [None, "mixed", "dflash"])
@pytest.mark.parametrize("max_num_seqs", [1, 4, 16])
def test_full_house_gives_what_each_gives_alone(drafter, max_num_seqs):
    wanted = [(tokens_of(i, 3 + 5 * i), params(i, 6 + i)) for i in range(10)]
    expected = [plain(*request) for request in wanted]
    proposer = PROPOSERS[drafter](scripts_of(*expected)) if drafter else None
    engine = make_engine(proposer, 3 if drafter else None, max_num_seqs=max_num_seqs)
    states = [engine.add_request(*request) for request in wanted]
    run_all(engine)
    assert [outcome(state.snapshot()) for state in states] == [outcome(output) for output in expected]
    assert_nothing_held(engine)


@pytest.mark.parametrize("chunk_size", [4, 8, 16, 64])
@pytest.mark.parametrize("drafter", [None, "dflash"])
def test_chunk_size_changes_nothing(chunk_size, drafter):
    prompt = tokens_of(2, 53)
    request = SamplingParams(
        temperature=0.9, max_tokens=12, ignore_eos=True, seed=3, logprobs=2, prompt_logprobs=2
    )
    expected = plain(prompt, request)
    proposer = PROPOSERS[drafter]({}) if drafter else None
    engine = make_engine(proposer, 7 if drafter else None, prefill_chunk_size=chunk_size)
    output = complete(engine, prompt, request)
    assert outcome(output) == outcome(expected)
    assert len(output.prompt_logprobs) == 53
    assert output.prompt_logprobs[0] is None
    assert all(prompt[i] in output.prompt_logprobs[i] for i in range(1, 53))


@pytest.mark.parametrize("chunk_size", [4, 16, 64])
def test_acceptance_does_not_depend_on_the_chunk_size(chunk_size):
    prompt = tokens_of(2, 53)
    counts = []
    for size in (8, chunk_size):
        engine = make_engine(PROPOSERS["dflash"]({}), 7, prefill_chunk_size=size)
        counts.append(complete(engine, prompt, params(4, 40)).outputs[0].speculation)
    assert counts[0] == counts[1]
    assert counts[0].num_accepted_tokens > 5


def test_acceptance_does_not_depend_on_neighbours():
    prompt = tokens_of(2, 30)
    alone = complete(make_engine(PROPOSERS["dflash"]({}), 7), prompt, params(4, 40)).outputs[0].speculation
    engine = make_engine(PROPOSERS["dflash"]({}), 7)
    others = [engine.add_request(tokens_of(i, 9 + i), params(i, 30)) for i in range(10, 14)]
    state = engine.add_request(prompt, params(4, 40))
    run_all(engine)
    assert state.snapshot().outputs[0].speculation == alone
    assert all(other.is_finished for other in others)


@pytest.mark.parametrize("drafter", [None, "dflash"])
def test_completions_are_those_of_separate_runs_with_the_derived_seeds(drafter):
    prompt = tokens_of(2, 30)
    request = SamplingParams(n=4, temperature=1.0, max_tokens=12, ignore_eos=True, seed=77, logprobs=1)
    proposer = PROPOSERS[drafter]({}) if drafter else None
    output = complete(make_engine(proposer, 3 if drafter else None), prompt, request)
    assert [c.seed for c in output.outputs] == [derive_seed(77, i) for i in range(4)]
    assert [c.index for c in output.outputs] == [0, 1, 2, 3]
    for completion in output.outputs:
        alone = plain(
            prompt,
            SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=completion.seed, logprobs=1),
        ).outputs[0]
        assert (alone.token_ids, alone.text, alone.logprobs) == (
            completion.token_ids,
            completion.text,
            completion.logprobs,
        )
    assert len({c.token_ids for c in output.outputs}) == 4


def test_request_without_a_seed_is_reproducible_from_the_seed_it_reports():
    prompt = tokens_of(2, 9)
    request = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    engine = make_engine(seed=None)
    first, second = complete(engine, prompt, request), complete(engine, prompt, request)
    assert first.outputs[0].seed != second.outputs[0].seed
    again = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=first.outputs[0].seed)
    assert plain(prompt, again).outputs[0].token_ids == first.outputs[0].token_ids


@pytest.mark.parametrize("seed", range(3))
def test_order_of_arrival_changes_nothing(seed):
    wanted = [(tokens_of(i % 3, 11 + i % 3 * 8), params(i)) for i in range(6)]
    expected = [outcome(plain(*request)) for request in wanted]
    engine = make_engine(PROPOSERS["dflash"]({}), 3, max_num_seqs=3)
    rng = random.Random(seed)
    order = rng.sample(range(6), 6)
    states = {}
    for i in order:
        states[i] = engine.add_request(*wanted[i])
        for _ in range(rng.randrange(4)):
            engine.step()
    run_all(engine)
    assert [outcome(states[i].snapshot()) for i in range(6)] == expected


def test_draft_length_of_one_request_leaves_the_others_alone():
    wanted = [(tokens_of(i, 12), params(i)) for i in range(4)]
    expected = [plain(*request) for request in wanted]
    engine = make_engine(PROPOSERS["oracle"](scripts_of(*expected)), 3)
    lengths = [None, 0, 1, 15]
    states = [
        engine.add_request(*request, num_speculative_tokens=length)
        for request, length in zip(wanted, lengths, strict=True)
    ]
    run_all(engine)
    outputs = [state.snapshot() for state in states]
    assert [outcome(output) for output in outputs] == [outcome(output) for output in expected]
    counts = [output.outputs[0].speculation for output in outputs]
    assert counts[1] is None
    assert [c.mean_acceptance_length > 1 for c in counts if c] == [True] * 3
    assert len(counts[2].num_accepted_tokens_per_pos) == 1
    assert len(counts[3].num_accepted_tokens_per_pos) == 15
