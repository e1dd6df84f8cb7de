"""Errors as OpenAI shapes them: a status, and ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from lean_laguna.core.errors import LeanLagunaError, RequestError

CONTEXT_LENGTH = "context_length_exceeded"
LONGEST_MESSAGE = 1000
"""Characters of a message; it may repeat what the request held, and that may be megabytes."""
_LONGEST_PARAM = 200
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """What a client is told when it does not get what it asked for.

    Attributes:
        status: HTTP status.
        param: The field at fault, if one is.
        code: A machine-readable reason.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(_shortened(message, LONGEST_MESSAGE))
        self.param = None if param is None else _shortened(param, _LONGEST_PARAM)
        self.status, self.code = status, code

    @property
    def type(self) -> str:
        """OpenAI's class of the error."""
        return _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> dict[str, Any]:
        """Return the response body."""
        fields = {"message": str(self), "type": self.type, "param": self.param, "code": self.code}
        return {"error": fields}


def _shortened(text: str, longest: int) -> str:
    """Return a text without its middle where it is too long: both ends say what is wrong."""
    half = (longest - 5) // 2
    return text if len(text) <= longest else f"{text[:half]} ... {text[-half:]}"


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the error for a request that is wrong in itself."""
    return ApiError(400, message, param=param, code=code)


def context_length_error(
    limit: int, num_prompt_tokens: int, max_tokens: int, what: str, *, or_more: bool = False
) -> ApiError:
    """Return the error for a prompt that does not fit, in the words that agents look for.

    Args:
        limit: The context limit, tokens.
        num_prompt_tokens: Tokens of the prompt.
        max_tokens: Tokens asked for the output.
        what: The field that holds the prompt: ``messages`` or ``prompt``.
        or_more: The prompt was not counted to its end.
    """
    more = " or more" if or_more else ""
    all_tokens, in_prompt = f"{num_prompt_tokens + max_tokens} tokens{more}", f"{num_prompt_tokens}{more}"
    return bad_request(
        f"This model's maximum context length is {limit} tokens. However, you requested "
        f"{all_tokens} ({in_prompt} in the {what}, {max_tokens} in the completion). Please reduce the "
        f"length of the {what} or completion.",
        what if num_prompt_tokens >= limit else "max_tokens",
        CONTEXT_LENGTH,
    )


def as_api_error(error: BaseException) -> ApiError:
    """Return what the client is told of an exception; a fault of ours keeps its details to the log."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return bad_request(str(error), error.param, error.code)
    if isinstance(error, LeanLagunaError):
        return bad_request(str(error))
    return ApiError(500, "the server failed on this request; its log has the details", code="internal_error")


def field_in(names: Mapping[str, str], field: str) -> str:
    """Return a field, or a part of one, under the name that the client gave it."""
    for ours in sorted(names, key=len, reverse=True):
        if field == ours or field.startswith((f"{ours}.", f"{ours}[")):
            return names[ours] + field[len(ours) :]
    return field


def renamed(error: BaseException, names: Mapping[str, str]) -> BaseException:
    """Return an error of a request that speaks of fields as the client wrote them; any other as it is.

    Args:
        error: What was raised.
        names: Our names of fields to the client's. In a message a name that is an English word too is
            replaced at its beginning only.
    """
    if not names or not isinstance(error, ApiError | RequestError):
        return error
    told = as_api_error(error)
    words = [
        re.escape(ours) if set("_[.") & set(ours) else rf"\A{re.escape(ours)}"
        for ours in sorted(names, key=len, reverse=True)
    ]
    pattern = rf"(?<![\w.'\"])(?:{'|'.join(words)})(?!\w)"
    message = re.sub(pattern, lambda found: names[found[0]], str(told))
    param = None if told.param is None else field_in(names, told.param)
    return ApiError(told.status, message, param=param, code=told.code)


@contextlib.contextmanager
def called(names: Mapping[str, str]) -> Iterator[None]:
    """Have errors raised within speak of fields as the client wrote them; see `renamed`.

    Raises:
        ApiError: In place of a RequestError, and of one with another name.
    """
    try:
        yield
    except (ApiError, RequestError) as error:
        raise renamed(error, names) from None
