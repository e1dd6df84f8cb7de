import pytest

from lean_laguna.core.errors import RequestError
from lean_laguna.core.structured_outputs import StructuredOutputs
from lean_laguna.server.errors import ApiError
from lean_laguna.server.output_format import output_names, structured_outputs
from lean_laguna.server.schemas import CompletionRequest

SCHEMA = {"type": "object"}


def read(**fields):
    return structured_outputs(CompletionRequest(prompt="x", **fields))


def test_every_spelling_of_a_schema_means_the_same():
    described = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
    spellings = [
        read(response_format=described),
        read(structured_outputs={"json": SCHEMA}),
        read(guided_json=SCHEMA),
    ]
    assert spellings == [StructuredOutputs(json='{"type": "object"}')] * 3


def test_text_asks_for_nothing_and_json_object_for_any():
    assert read() is read(response_format={"type": "text"}) is None
    assert read(response_format={"type": "json_object"}) == StructuredOutputs(json_object=True)
    assert read(guided_choice=["a", "b"]) == StructuredOutputs(choice=("a", "b"))
    assert read(guided_regex="a+", response_format={"type": "text"}) == StructuredOutputs(regex="a+")


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "a", "structured_outputs": {"regex": "a"}},
        {"response_format": {"type": "yaml"}},
        {"response_format": {}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": "x"}}},
        {"structured_outputs": {"jsn": {}}},
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
    ],
)
def test_what_is_said_twice_or_wrongly_is_refused(fields):
    with pytest.raises((ApiError, RequestError)):
        read(**fields)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_choice": [""]}, "guided_choice"),
        ({"guided_json": 5}, "guided_json"),
        ({"structured_outputs": {"choice": [""]}}, "structured_outputs"),
    ],
)
def test_a_mistake_is_told_under_the_name_that_the_request_used(fields, param):
    with pytest.raises((ApiError, RequestError), match=f"^{param}") as caught:
        read(**fields)
    assert caught.value.param == param


def test_later_errors_learn_the_name_from_the_request():
    schema = "response_format.json_schema.schema"
    described = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    for fields, name in (
        ({"response_format": described}, schema),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_regex": "a", "response_format": {"type": "text"}}, "guided_regex"),
    ):
        assert output_names(CompletionRequest(prompt="x", **fields))["structured_outputs"] == name
    assert output_names(CompletionRequest(prompt="x", structured_outputs={"regex": "a"})) == {}
