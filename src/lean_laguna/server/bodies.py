"""From the bytes of a request to a checked body: every key has a meaning, or the request is refused.

Three kinds of key beside those of the schema: keys that change nothing about the output are let through; keys
of other servers whose effect does not exist here are let through at the value that asks for nothing, such as
``best_of: 1``; everything else is refused with the nearest name, since a request that is served as if a
misspelt option were not there gives wrong results without a word. (``unknown_fields: ignore`` says so in a
response header instead.)
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from starlette.requests import Request

from lean_laguna.core.errors import nearest
from lean_laguna.server.errors import ApiError, bad_request
from lean_laguna.server.settings import ServerConfig

T = TypeVar("T", bound=msgspec.Struct)
IGNORED_HEADER = "x-lean-laguna-ignored"

WITHOUT_EFFECT = (
    *("user", "metadata", "store", "service_tier", "safety_identifier", "request_id", "priority"),
    *("prediction", "prompt_cache_key", "prompt_cache_retention", "cache_prompt", "id_slot"),
    *("timings_per_token", "include", "client_metadata", "cache_control", "inference_geo"),
)
# What asks for nothing, of options that do not exist here.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "cache_salt": (),
    "kv_transfer_params": ({},),
    "vllm_xargs": ({},),
    "logits_processors": ([],),
    "truncation_side": ("left",),
    "spaces_between_special_tokens": (True,),
    "prompt_embeds": (),
    "repetition_detection": (),
    "modalities": (["text"],),
    "audio": (),
    "functions": ([],),
    "function_call": ("none",),
    "web_search_options": (),
    "verbosity": ("medium",),
    "documents": ([],),
    "chat_template": (),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "continue_final_message": (False,),
    "typical_p": (1,),
    "tfs_z": (1,),
    "mirostat": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
    "features": (),
    "background": (False,),
    "previous_response_id": (),
    "conversation": (),
    "truncation": ("disabled",),
    "max_tool_calls": (),
    "container": (),
    "mcp_servers": ([],),
    "context_management": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
}
_IGNORED_QUERY = ("beta", "api-version")
_PLACE = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(?P<name>.*?)`")
_UNKNOWN = re.compile(r"unknown field `(?P<name>.*)`", re.DOTALL)


async def read_body(request: Request, limit: int) -> bytes:
    """Return a request's body.

    Raises:
        ApiError: 413, it is longer than ``limit`` bytes.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:  # before it has been sent
        raise _too_long(limit)
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise _too_long(limit)
        parts.append(part)
    return b"".join(parts)


def _too_long(limit: int) -> ApiError:
    return ApiError(413, f"the request is longer than the {limit} bytes that this server takes")


def decode_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object that a body holds.

    Raises:
        ApiError: 400, it holds something else.
    """
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise bad_request(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise bad_request(f"the body must be a JSON object, found {_kind(value)}")
    return value


def with_query(fields: dict[str, Any], request: Request, schema: type[msgspec.Struct]) -> dict[str, Any]:
    """Add options that stand in the URL's query, as published recipes write ``?top_k=20``; the body wins.

    Raises:
        ApiError: 400, a query key is no option.
    """
    names = schema.__struct_fields__
    for key, text in request.query_params.items():
        if key in _IGNORED_QUERY:
            continue
        if key not in names:
            raise bad_request(f"unknown query parameter '{key}'{nearest(key, names)}", key)
        if key not in fields:
            try:
                fields[key] = msgspec.json.decode(text.encode())
            except (msgspec.MsgspecError, ValueError, RecursionError):
                fields[key] = text
    return fields


def parse(fields: Mapping[str, Any], schema: type[T], config: ServerConfig) -> tuple[T, list[str]]:
    """Check the keys and types of a body.

    Args:
        fields: The JSON object.
        schema: What it must hold.
        config: Says what to do with unknown keys.

    Returns:
        The body, and the unknown keys that were ignored.

    Raises:
        ApiError: 400, naming the key.
    """
    known, kept, ignored = schema.__struct_fields__, {}, []
    for key, value in fields.items():
        if key in known:
            # Languages with one kind of number write 256.0; it is read as vLLM reads it.
            is_whole = isinstance(value, float) and value.is_integer() and key in _whole_fields(schema)
            kept[key] = int(value) if is_whole else value
        elif key in NEUTRAL:
            _check_neutral(key, value, fields)
        elif key not in WITHOUT_EFFECT:
            if config.unknown_fields == "refuse":
                raise bad_request(f"unknown field '{key}'{_nearest(key, known)}", key)
            ignored.append(key)
    return convert(kept, schema), ignored


def convert(fields: Mapping[str, Any], schema: type[T], where: str = "") -> T:
    """Check the types of an object.

    Raises:
        ApiError: 400, naming the key.
    """
    try:
        return msgspec.convert(fields, schema)
    except msgspec.ValidationError as error:
        place = _PLACE.match(str(error))
        assert place is not None
        what, path = place["what"], (place["path"] or "").replace("[...]", "")
        if unknown := _UNKNOWN.search(what):
            path = f"{path}.{unknown['name']}".lstrip(".")
        elif missing := _MISSING.search(what):
            path, what = f"{path}.{missing['name']}".lstrip("."), "is missing"
        elif what.lower().startswith("invalid enum value"):
            what += _accepted(schema, path)
        path = ".".join(part for part in (where, path) if part)
        said = what if what == "is missing" else f": {what[:1].lower()}{what[1:]}"
        raise bad_request(f"{path}{'' if said[0] == ':' else ' '}{said}", path) from None
    except RecursionError:
        raise bad_request("the body is nested too deeply") from None


def _check_neutral(key: str, value: Any, fields: Mapping[str, Any]) -> None:
    is_best_of_n = key == "best_of" and value == fields.get("n")
    if value is None or is_best_of_n or any(_same(value, accepted) for accepted in NEUTRAL[key]):
        return
    accepted = " or ".join(("null", *(msgspec.json.encode(a).decode() for a in NEUTRAL[key])))
    raise bad_request(f"'{key}' is not supported here; only {accepted} is taken", key)


def _same(value: Any, accepted: Any) -> bool:
    return bool(value == accepted) and isinstance(value, bool) == isinstance(accepted, bool)


def _nearest(key: str, known: tuple[str, ...]) -> str:
    hint = nearest(key, known)
    return hint if hint.startswith("; did") else ""


@functools.cache
def _whole_fields(schema: type[msgspec.Struct]) -> frozenset[str]:
    """Return the fields that take a whole number, and no other."""
    kinds = {name: {kind, *get_args(kind)} for name, kind in get_type_hints(schema).items()}
    return frozenset(name for name, found in kinds.items() if int in found and float not in found)


def _accepted(schema: type[msgspec.Struct], field: str) -> str:
    """Return the words that a field takes, for a message."""
    kinds = [get_type_hints(schema).get(field)]
    words = []
    while kinds:
        kind = kinds.pop(0)
        words += [repr(word) for word in get_args(kind)] if get_origin(kind) is Literal else []
        kinds += [] if get_origin(kind) is Literal else get_args(kind)
    return f"; accepted: {', '.join(words)}" if words else ""


def _kind(value: Any) -> str:
    names = {list: "a list", str: "a text", bool: "a truth value", type(None): "null"}
    return names.get(type(value), "a number")
