"""A grammar that makes a reply call a tool, for ``tool_choice`` "required" or a function's name.

The reply is calls in the ``poolside_v1`` syntax and nothing else, after the thinking where that is on. The
arguments come in the schema's order, those not required may be left out. An argument that may be a string is
free text, as the model writes strings bare, of the length that its schema asks for; any other is JSON that
follows its schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from lean_laguna.core.errors import RequestError
from lean_laguna.core.structured_outputs import StructuredOutputs
from lean_laguna.models.tokenizer import Tokenizer
from lean_laguna.server.argument_types import STRING_ONLY, ToolSchemas
from lean_laguna.server.reply_tool_calls import (
    CALL_END,
    CALL_START,
    KEY_END,
    KEY_START,
    VALUE_END,
    VALUE_START,
)
from lean_laguna.spec.grammar import SOME_SPACE

REFERENCE_KEYS = ("$defs", "definitions")
# Characters of a string that are counted; with more, llguidance gives the grammar up.
_MOST_REQUIRED, _MOST_COUNTED = 128, 1 << 16


def forced_calls(
    tools: Sequence[Mapping[str, Any]],
    choice: str | Mapping[str, Any],
    tokenizer: Tokenizer,
    *,
    line_layout: bool = False,
    parallel: bool = True,
) -> StructuredOutputs:
    """Return what the reply's text must be.

    Args:
        tools: On offer, as the client sent them.
        choice: "required", or an object that names a function.
        tokenizer: Tells which tags are tokens of their own.
        line_layout: Whether the template puts tags on lines of their own.
        parallel: Whether several calls may follow each other; a named function is called once.

    Raises:
        RequestError: No tool has the name, or arguments cannot be made to follow a tool's schema.
    """
    schemas = ToolSchemas(tools)
    names = schemas.names
    if choice != "required":
        name = _chosen_name(choice)
        if name not in schemas:
            raise RequestError(
                f"tool_choice names the function {name!r}, which is not among the tools: {', '.join(names)}",
                param="tool_choice",
            )
        names, parallel = (name,), False
    for name in names:
        if fault := schemas.fault(name):
            raise RequestError(f"tools: the schema of the function {name!r}: {fault}", param="tools")
    start, end = _tag(CALL_START, tokenizer), _tag(CALL_END, tokenizer)
    line = '"\\n" ' if line_layout else ""
    optional_line = '"\\n"? ' if line_layout else ""
    more = f" ({optional_line}call)*" if parallel else ""
    rules = [f"start: {optional_line}call{more}"]
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(names))))
    for i, name in enumerate(names):
        arguments = _arguments(schemas, name, f"value_{i}", line, rules)
        rules.append(f"call_{i}: {start} {json.dumps(name, ensure_ascii=False)} {line}{arguments}{end}")
    return StructuredOutputs(grammar="\n".join(rules))


def _arguments(schemas: ToolSchemas, name: str, prefix: str, line: str, rules: list[str]) -> str:
    """Return the arguments' part of a call, and add the rules of their values."""
    required = schemas.required(name)
    parts = []
    for j, (key, schema) in enumerate(schemas.properties(name).items()):
        value = f"{prefix}_{j}"
        rules.append(_value_rule(value, schema, schemas, name, key))
        opening = json.dumps(f"{KEY_START}{key}{KEY_END}", ensure_ascii=False)
        part = f"{opening} {line}{json.dumps(VALUE_START)} {value} {line}"
        parts.append(part if key in required else f"({part.rstrip()})? ")
    return "".join(parts)


def _value_rule(rule: str, schema: Any, schemas: ToolSchemas, name: str, key: str) -> str:
    """Return the rule of a value with its closing tag."""
    if "string" not in schemas.types(name, key):
        root = schemas.root(name)
        space = {"x-guidance": {"whitespace_flexible": True, "whitespace_pattern": SOME_SPACE}}
        kept = {k: root[k] for k in REFERENCE_KEYS if k in root}
        document = {**space, **kept, **(schema if isinstance(schema, Mapping) else {})}
        return f"{rule}: %json {json.dumps(document)} {json.dumps(VALUE_END)}"
    asked = schemas.argument(name, key)
    choices = [asked["const"]] if "const" in asked else asked.get("enum")
    if isinstance(choices, list) and all(isinstance(text, str) and text for text in choices) and choices:
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in choices)
        return f"{rule}: ({texts}) {json.dumps(VALUE_END)}"
    pattern = asked.get("pattern") if schemas.types(name, key) == STRING_ONLY else None
    text = _free_text(*schemas.lengths(name, key), pattern if isinstance(pattern, str) else "")
    return f"{rule}[suffix={json.dumps(VALUE_END)}]: {text}"


def _free_text(least: int, most: int | None, pattern: str) -> str:
    """Return what a string may be, up to its closing tag.

    Args:
        least: Characters.
        most: Characters, or None.
        pattern: What it must hold, as JSON schema has it; empty for anything.
    """
    least = min(least, _MOST_REQUIRED)
    limit = "" if most is None or most > _MOST_COUNTED else max(least, most)
    text = f"/(?s:.{{{least},{limit}}})/"
    if held := _held(pattern):
        text += f" & /{held}/"
    # Too short a text must not go on beyond its closing tag.
    closing = VALUE_END.replace("/", r"\/")
    return f"{text} & ~/(?s:.*){closing}(?s:.*)/" if least or held else text


def _held(pattern: str) -> str:
    """Return the expression of whole texts that hold a pattern; empty where it cannot be put so.

    A pattern is found anywhere in the text unless it says where: with ``^`` and ``$`` at its ends.
    """
    begins, ends = pattern.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$$", pattern) is not None
    inner = pattern[begins : len(pattern) - ends]
    if not inner or ((begins or ends) and "|" in re.sub(r"\\.|\[[^]]*\]|\([^()]*\)", "", inner)):
        return ""
    inner = re.sub(r"\\.|/", lambda part: part[0] if part[0] != "/" else r"\/", inner)
    return f"{'' if begins else '(?s:.*)'}(?:{inner}){'' if ends else '(?s:.*)'}"


def _tag(tag: str, tokenizer: Tokenizer) -> str:
    token = tokenizer.token_to_id(tag)
    return json.dumps(tag) if token is None else f"<[{token}]>"


def _chosen_name(choice: str | Mapping[str, Any]) -> Any:
    if not isinstance(choice, Mapping):
        return choice
    function = choice.get("function", choice)
    return function.get("name") if isinstance(function, Mapping) else None
