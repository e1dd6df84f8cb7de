"""Constraints are made, or refused, when a request comes in."""

import pytest

from lean_laguna.core.errors import RequestError
from lean_laguna.core.types import SamplingParams
from support.engines import assert_nothing_held, make_engine, run_all, tiny_tokenizer, tokens_of

THINK, CLOSE = (tiny_tokenizer().token_to_id(tag) for tag in ("<think>", "</think>"))


@pytest.mark.parametrize(
    "structured", [{"json": {"type": "strange"}}, {"json": "{"}, {"regex": "(a"}, {"grammar": "start: b"}]
)
def test_a_constraint_that_cannot_be_followed_is_refused_before_any_token(structured):
    engine = make_engine()
    with pytest.raises(RequestError, match="structured_outputs") as refused:
        engine.add_request(tokens_of(0, 5), SamplingParams(structured_outputs=structured))
    assert refused.value.param == "structured_outputs"
    assert_nothing_held(engine)


def test_each_completion_keeps_its_own_place_in_the_grammar():
    engine = make_engine()
    params = SamplingParams(n=4, temperature=1.5, seed=1, structured_outputs={"choice": ["aab", "abba", "b"]})
    state = engine.add_request(tokens_of(0, 5), params)
    run_all(engine)
    texts = [output.text for output in state.snapshot().outputs]
    assert set(texts) <= {"aab", "abba", "b"}
    assert len(set(texts)) > 1


@pytest.mark.parametrize("budget", [0, 3])
def test_thinking_is_closed_by_its_own_token_when_the_budget_is_spent(budget):
    engine = make_engine()
    params = SamplingParams(
        temperature=0, max_tokens=12, ignore_eos=True, thinking_token_budget=budget, logit_bias={CLOSE: -100}
    )
    state = engine.add_request([*tokens_of(0, 5), THINK], params)
    free = engine.add_request([*tokens_of(0, 5), THINK, CLOSE], params)
    run_all(engine)
    said = state.snapshot().outputs[0].token_ids
    assert said.index(CLOSE) == budget
    assert CLOSE not in free.snapshot().outputs[0].token_ids


def test_thinking_and_then_the_grammar():
    engine = make_engine()
    params = SamplingParams(
        temperature=1, seed=2, max_tokens=40, thinking_token_budget=4, structured_outputs={"choice": ["yes"]}
    )
    state = engine.add_request([*tokens_of(0, 5), THINK], params)
    run_all(engine)
    output = state.snapshot().outputs[0]
    assert output.finish_reason == "stop"
    assert output.text.endswith("</think>yes")
