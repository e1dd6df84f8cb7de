"""What a checkpoint recommends for generation: ``generation_config.json``, and the stop ids from every place.

Only recommendations: a request that says otherwise wins. Keys of Hugging Face's format that this system does
not know are none of its business and are passed over.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lean_laguna.core.errors import CheckpointError, RequestError
from lean_laguna.core.files import is_there, parse_json
from lean_laguna.core.json_fields import is_count
from lean_laguna.core.types import SamplingParams

GENERATION_CONFIG_FILE = "generation_config.json"


@dataclass(frozen=True)
class GenerationConfig:
    """Defaults that a checkpoint declares; None where it is silent.

    Attributes:
        temperature: 0 where the file turns sampling off (``do_sample`` false).
        max_tokens: The file's ``max_new_tokens``.
        eos_token_ids: End-of-sequence ids, in the file's order.
        default_chat_template_kwargs: Arguments that the chat template gets unless a request gives its own.
        reasoning_parser: Name of the parser for thinking text, such as ``poolside_v1``.
        tool_call_parser: Name of the parser for tool calls.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    default_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None

    @classmethod
    def from_dir(cls, path: str | Path) -> GenerationConfig:
        """Read ``generation_config.json`` of a checkpoint folder; a folder without one recommends nothing.

        Raises:
            CheckpointError: The file is not a JSON object, or a value has the wrong type.
        """
        file = Path(path) / GENERATION_CONFIG_FILE
        return cls.from_dict(read_json_object(file), str(file)) if is_there(file) else cls()

    @classmethod
    def from_dict(cls, given: Mapping[str, Any], where: str) -> GenerationConfig:
        """Build from the file's content.

        Args:
            given: The JSON object.
            where: The file, for messages.

        Raises:
            CheckpointError: A value has the wrong type, or is out of range.
        """
        numbers = {name: _number(given, name, where) for name in ("temperature", "top_p", "min_p")}
        numbers["repetition_penalty"] = _number(given, "repetition_penalty", where)
        if not isinstance(given.get("do_sample"), bool | None):
            raise CheckpointError(f"{where}: 'do_sample' must be true or false, found {given['do_sample']!r}")
        if given.get("do_sample") is False:
            numbers["temperature"] = 0.0
        kwargs = given.get("default_chat_template_kwargs")
        if not isinstance(kwargs, Mapping | None):
            raise CheckpointError(
                f"{where}: 'default_chat_template_kwargs' must be an object, found {kwargs!r}"
            )
        config = cls(
            **numbers,
            top_k=_whole(given, "top_k", where),
            max_tokens=_whole(given, "max_new_tokens", where),
            eos_token_ids=read_eos_token_ids(given, where),
            default_chat_template_kwargs=dict(kwargs or {}),
            reasoning_parser=_text(given, "reasoning_parser", where),
            tool_call_parser=_text(given, "tool_call_parser", where),
        )
        try:
            SamplingParams(**config.sampling_defaults())
        except RequestError as error:
            raise CheckpointError(f"{where}: {error}") from None
        return config

    def sampling_defaults(self) -> dict[str, Any]:
        """Return the declared values by their name in ``SamplingParams``."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def read_json_object(file: Path) -> dict[str, Any]:
    """Read a JSON file of a checkpoint that must hold an object.

    Raises:
        CheckpointError: The file cannot be read, is not JSON, or holds something else.
    """
    try:
        value = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: not readable as JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: must hold a JSON object, found a {type(value).__name__}")
    return value


def read_eos_token_ids(given: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """Return ``eos_token_id`` as a tuple; the key may hold one id, a list of ids, or be absent.

    Raises:
        CheckpointError: The key holds something else.
    """
    value = given.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(is_count(i, 0) for i in ids):
        raise CheckpointError(
            f"{where}: 'eos_token_id' must be a token id or a list of them, found {value!r}"
        )
    return tuple(dict.fromkeys(ids))


def _number(given: Mapping[str, Any], name: str, where: str) -> float | None:
    value = given.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise CheckpointError(f"{where}: '{name}' must be a number, found {value!r}")
    return value


def _whole(given: Mapping[str, Any], name: str, where: str) -> int | None:
    value = given.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise CheckpointError(f"{where}: '{name}' must be a whole number, found {value!r}")
    return value


def _text(given: Mapping[str, Any], name: str, where: str) -> str | None:
    value = given.get(name)
    if not isinstance(value, str | None):
        raise CheckpointError(f"{where}: '{name}' must be a text, found {value!r}")
    return value
