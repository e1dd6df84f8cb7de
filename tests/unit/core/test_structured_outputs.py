"""Exactly one constraint, of the right kind, in one form."""

import pytest

from lean_laguna.core.errors import RequestError
from lean_laguna.core.structured_outputs import StructuredOutputs
from lean_laguna.core.types import SamplingParams


def test_schema_and_choices_take_one_form_that_can_be_a_key():
    as_object = StructuredOutputs(json={"b": 1, "a": 2})
    assert as_object == StructuredOutputs(json='{"b": 1, "a": 2}')
    assert StructuredOutputs(choice=["a", "b"]) == StructuredOutputs(choice=("a", "b"))
    assert len({as_object, StructuredOutputs(json=True), StructuredOutputs(regex="a")}) == 3


def test_a_mapping_is_read_and_null_counts_as_absent():
    params = SamplingParams(structured_outputs={"regex": "a+", "json": None, "choice": None})
    assert params.structured_outputs == StructuredOutputs(regex="a+")
    assert SamplingParams.from_dict({"structured_outputs": None}).structured_outputs is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "found none of them"),
        ({"regex": "a", "json_object": True}, "found regex and json_object"),
        ({"regexp": "a"}, "unknown key 'regexp'.*did you mean 'regex'"),
        ({"regex": 3}, "structured_outputs.regex must be text, found 3"),
        ({"json": 3}, "structured_outputs.json must be text"),
        ({"json": {"a": object()}}, "structured_outputs.json is no JSON"),
        ({"json_object": "yes"}, "json_object .* true or false"),
        ({"choice": "ab"}, "choice must be a list of non-empty texts"),
        ({"choice": []}, "choice must be a list of non-empty texts"),
        ({"choice": ["a", ""]}, "choice must be a list of non-empty texts"),
        ({"choice": 3}, "choice must be a list of non-empty texts"),
        ("a+", "structured_outputs must be an object, found 'a\\+'"),
    ],
)
def test_anything_else_is_refused_by_name(given, message):
    with pytest.raises(RequestError, match=message) as refused:
        SamplingParams(structured_outputs=given)
    assert refused.value.param == "structured_outputs"


def test_thinking_budget_is_a_count_or_free():
    assert SamplingParams(thinking_token_budget=-1).thinking_token_budget is None
    assert SamplingParams(thinking_token_budget=0).thinking_token_budget == 0
    for wrong in (-2, 1.5, True, "1"):
        with pytest.raises(RequestError, match="thinking_token_budget must be"):
            SamplingParams(thinking_token_budget=wrong)
