import pytest

from lean_laguna.core.errors import CheckpointError, RequestError
from lean_laguna.server.errors import (
    LONGEST_MESSAGE,
    ApiError,
    as_api_error,
    called,
    context_length_error,
    renamed,
)
from lean_laguna.server.messages_api import error_body


def test_the_context_error_holds_both_numbers_in_the_words_agents_look_for():
    error = context_length_error(100, 90, 20, "messages")
    assert error.body() == {
        "error": {
            "message": "This model's maximum context length is 100 tokens. However, you requested 110 tokens "
            "(90 in the messages, 20 in the completion). Please reduce the length of the messages or "
            "completion.",
            "type": "invalid_request_error",
            "param": "max_tokens",
            "code": "context_length_exceeded",
        }
    }
    assert context_length_error(100, 100, 1, "messages").param == "messages"
    uncounted = str(context_length_error(100, 500, 20, "prompt", or_more=True))
    assert "requested 520 tokens or more (500 or more in the prompt, 20 in the completion)" in uncounted
    anthropic = error_body(error)
    assert anthropic["type"] == "error"
    assert anthropic["error"]["message"].startswith("prompt is too long: ")


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (RequestError("no", param="n"), 400, "invalid_request_error"),
        (CheckpointError("no"), 400, "invalid_request_error"),
        (ApiError(401, "no"), 401, "authentication_error"),
        (ApiError(429, "no"), 429, "rate_limit_error"),
        (ApiError(503, "no"), 503, "server_error"),
        (ValueError("secret detail"), 500, "server_error"),
    ],
)
def test_every_failure_has_a_status_and_a_class(error, status, kind):
    told = as_api_error(error)
    assert (told.status, told.type) == (status, kind)
    assert "secret" not in str(told)


@pytest.mark.parametrize("make", [lambda text: ApiError(400, text, param=text), RequestError])
def test_a_message_never_repeats_a_whole_body(make):
    told = as_api_error(make("unknown field '" + "x" * 2**20 + "'; did you mean 'y'?"))
    assert len(str(told)) <= LONGEST_MESSAGE
    assert str(told).startswith("unknown field 'x")
    assert str(told).endswith("did you mean 'y'?")
    assert len(told.param or "") <= 200


def test_an_error_speaks_of_fields_as_the_client_wrote_them():
    names = {"stop": "stop_sequences", "a_b": "x", "a_b.json": "x.schema", "messages[1]": "input[0]"}
    cases = {
        ("stop must hold texts, found 'a_b' to stop", "stop"): (
            "stop_sequences must hold texts, found 'a_b' to stop",
            "stop_sequences",
        ),
        ("no token that a_b can begin with", "other"): ("no token that x can begin with", "other"),
        ("a_b.json is no JSON", "a_b.json"): ("x.schema is no JSON", "x.schema"),
        ("messages[1].content is missing", "messages[1].content"): (
            "input[0].content is missing",
            "input[0].content",
        ),
        ("messages[10] of a_bc", "messages[10]"): ("messages[10] of a_bc", "messages[10]"),
    }
    for (message, param), expected in cases.items():
        with pytest.raises(ApiError) as caught, called(names):
            raise RequestError(message, param=param, code="c")
        assert (str(caught.value), caught.value.param) == expected
        assert (caught.value.status, caught.value.code) == (400, "c")
    fault = KeyError("stop")
    assert renamed(fault, names) is fault
