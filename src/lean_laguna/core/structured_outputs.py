"""What a request says its output must be: a schema, an expression, a choice, a grammar.

Source: the field names of vLLM's ``structured_outputs``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from lean_laguna.core.errors import ConfigError, RequestError, reject_unknown


@dataclass(frozen=True)
class StructuredOutputs:
    """What the output's text must be; exactly one of the first five is given.

    Attributes:
        json: A JSON schema, as an object or as text; kept as text.
        json_object: Any JSON object.
        regex: The whole text matches it.
        choice: The text is one of these.
        grammar: A grammar in Lark's syntax (llguidance's dialect), or in GBNF.
        disable_any_whitespace: JSON is written without white space between its parts.
    """

    json: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        """Keep schema and choices in one form, and refuse what is of another kind.

        Raises:
            RequestError: Names the field.
        """
        where = "structured_outputs"
        if isinstance(self.json, Mapping | bool):
            object.__setattr__(self, "json", _schema_text(self.json, f"{where}.json"))
        for name in ("json", "regex", "grammar"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise RequestError(f"{where}.{name} must be text, found {value!r:.200}", param=where)
        if not isinstance(self.json_object, bool) or not isinstance(self.disable_any_whitespace, bool):
            raise RequestError(
                f"{where}: json_object and disable_any_whitespace are true or false", param=where
            )
        if self.choice is not None:
            is_list = isinstance(self.choice, Sequence) and not isinstance(self.choice, str)
            texts = tuple(self.choice) if is_list else ()
            if not texts or any(not isinstance(text, str) or not text for text in texts):
                raise RequestError(
                    f"{where}.choice must be a list of non-empty texts, found {self.choice!r:.200}",
                    param=where,
                )
            object.__setattr__(self, "choice", texts)
        given = [name for name in ("json", "regex", "choice", "grammar") if getattr(self, name) is not None]
        given += ["json_object"] if self.json_object else []
        if len(given) != 1:
            raise RequestError(
                f"{where} must hold one of json, json_object, regex, choice, grammar; found "
                + (" and ".join(given) or "none of them"),
                param=where,
            )

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> StructuredOutputs:
        """Build from a mapping, strict about unknown keys; a key that is null counts as absent.

        Raises:
            RequestError: On an unknown key or a value of another kind.
        """
        try:
            reject_unknown(given, (f.name for f in fields(cls)), "structured_outputs")
        except ConfigError as error:
            raise RequestError(str(error), param="structured_outputs") from None
        return cls(**{key: value for key, value in given.items() if value is not None})


def _schema_text(schema: Any, where: str) -> str:
    try:
        return json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{where} is no JSON: {error}", param="structured_outputs") from None
