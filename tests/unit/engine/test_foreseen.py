"""What a grammar leaves no choice about is drafted without a drafter, and changes nothing but the steps."""

import json

import pytest

from lean_laguna.core.types import SamplingParams
from support.engines import make_engine, outcome, plain, run_all, scripts_of, tokens_of
from support.engines import never as wrong_drafter

SCHEMA = {
    "type": "object",
    "properties": {"first_name": {"const": "Ada"}, "last_name": {"const": "Lovelace"}},
    "required": ["first_name", "last_name"],
    "additionalProperties": False,
}
STRUCTURED = {"json": SCHEMA, "disable_any_whitespace": True}
TEXT = '{"first_name":"Ada","last_name":"Lovelace"}'


def params(**changes):
    given = {"temperature": 1.0, "seed": 3, "max_tokens": 100, "structured_outputs": STRUCTURED}
    return SamplingParams(**(given | changes))


def num_steps(engine):
    return engine.stats().num_steps


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forced_text_comes_in_few_steps_without_a_drafter(temperature):
    engine = make_engine(prefill_chunk_size=16)
    state = engine.add_request(tokens_of(0, 5), params(temperature=temperature))
    run_all(engine)
    said = state.snapshot().outputs[0]
    assert json.loads(said.text) == json.loads(TEXT)
    assert said.finish_reason == "stop"
    assert said.speculation is None
    assert num_steps(engine) < len(said.token_ids) / 4
    assert sum(said.is_draft_token) > len(said.token_ids) / 2
    slow = make_engine(prefill_chunk_size=16)
    off = slow.add_request(tokens_of(0, 5), params(temperature=temperature), num_speculative_tokens=0)
    run_all(slow)
    assert outcome(off.snapshot()) == outcome(state.snapshot())
    assert num_steps(slow) >= len(said.token_ids)


@pytest.mark.parametrize("max_tokens", [1, 2, 7, 20])
def test_no_more_is_drafted_than_may_be_said(max_tokens):
    engine = make_engine(prefill_chunk_size=16, max_model_len=5 + max_tokens)
    state = engine.add_request(tokens_of(0, 5), params(max_tokens=max_tokens))
    run_all(engine)
    said = state.snapshot().outputs[0]
    assert (len(said.token_ids), said.finish_reason) == (max_tokens, "length")
    assert TEXT.startswith(said.text)


def test_a_drafter_that_errs_gives_way_to_what_is_foreseen():
    expected = plain(tokens_of(0, 5), params())
    engine = make_engine(wrong_drafter(scripts_of(expected)), 7)
    state = engine.add_request(tokens_of(0, 5), params())
    run_all(engine)
    assert outcome(state.snapshot()) == outcome(expected)
    counts = state.snapshot().outputs[0].speculation
    assert counts.draft_acceptance_rate > 0.8
    assert len(counts.num_accepted_tokens_per_pos) <= 15


def test_a_sequence_without_constraints_is_not_drafted_for():
    engine = make_engine()
    engine.add_request(tokens_of(0, 5), SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    run_all(engine)
    assert num_steps(engine) == 9
