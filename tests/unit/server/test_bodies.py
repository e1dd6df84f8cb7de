import msgspec
import pytest

from lean_laguna.server.bodies import NEUTRAL, WITHOUT_EFFECT, convert, decode_object, parse
from lean_laguna.server.errors import ApiError
from lean_laguna.server.schemas import ChatRequest, CompletionRequest
from lean_laguna.server.settings import ServerConfig

STRICT, LOOSE = ServerConfig(), ServerConfig(unknown_fields="ignore")


def refused(fields, schema=CompletionRequest, config=STRICT):
    with pytest.raises(ApiError) as caught:
        parse(fields, schema, config)
    assert caught.value.status == 400
    return caught.value


def test_fields_are_read_and_what_changes_nothing_is_let_through():
    fields = dict.fromkeys(WITHOUT_EFFECT, "anything")
    body, ignored = parse({"prompt": "x", "n": 2, **fields}, CompletionRequest, STRICT)
    assert (body.prompt, body.n, ignored) == ("x", 2, [])


def test_options_of_other_servers_are_taken_at_the_value_that_asks_for_nothing():
    for name, accepted in NEUTRAL.items():
        for value in (None, *accepted):
            parse({"prompt": "x", name: value}, CompletionRequest, STRICT)
        assert refused({"prompt": "x", name: {"a": ["real", "request"]}}).param == name


def test_true_is_not_one():
    assert refused({"prompt": "x", "best_of": True}).param == "best_of"
    assert parse({"prompt": "x", "best_of": 3, "n": 3}, CompletionRequest, STRICT)


def test_an_unknown_key_is_refused_with_the_nearest_name_or_ignored_and_told():
    error = refused({"prompt": "x", "max_token": 3})
    assert (error.param, "did you mean 'max_tokens'?" in str(error)) == ("max_token", True)
    assert parse({"prompt": "x", "max_token": 3}, CompletionRequest, LOOSE)[1] == ["max_token"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [1]}, "messages[0]"),
        ({"messages": [], "stream_options": {"x": 1}}, "stream_options.x"),
        (
            {"messages": [], "speculative": {"num_speculative_tokens": "a"}},
            "speculative.num_speculative_tokens",
        ),
        ({"messages": [], "logit_bias": {"1": "a"}}, "logit_bias"),
        ({}, "messages"),
    ],
)
def test_a_wrong_type_is_named_by_its_path(fields, param):
    assert refused(fields, ChatRequest).param == param


def test_a_part_of_a_body_is_named_from_the_body_on():
    class Part(msgspec.Struct):
        a: int

    with pytest.raises(ApiError, match=r"outer\.a") as caught:
        convert({"a": "x"}, Part, "outer")
    assert caught.value.param == "outer.a"


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"3", b"null", b'"a"', b"\xff", b"[" * 10**5])
def test_a_body_that_is_no_object_is_refused(body):
    with pytest.raises(ApiError, match="body") as caught:
        decode_object(body)
    assert caught.value.status == 400


def test_what_is_missing_and_what_would_be_right_are_named():
    missing = refused({"model": "m"})
    assert (str(missing), missing.param) == ("prompt is missing", "prompt")
    wrong = refused({"messages": [], "reasoning_effort": "huge"}, ChatRequest)
    assert wrong.param == "reasoning_effort"
    assert str(wrong).endswith("'huge'; accepted: 'none', 'minimal', 'low', 'medium', 'high', 'xhigh'")


def test_a_whole_number_may_be_written_with_a_point():
    body, _ = parse({"prompt": "x", "max_tokens": 256.0, "temperature": 1.0}, CompletionRequest, STRICT)
    assert (body.max_tokens, type(body.max_tokens), type(body.temperature)) == (256, int, float)
    for wrong in ({"max_tokens": 3.5}, {"stream": 1.0}, {"stop": 1.0}):
        refused({"prompt": "x", **wrong})
