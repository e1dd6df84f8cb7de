"""Which JSON types a tool's schema allows for an argument, and the text of an argument as such a value.

A model writes every argument as bare text; only the schema says whether ``123`` is a number or a zip code.
Where the schema says "string" and nothing else, the text is the value, untouched. Elsewhere the text is read
as JSON, then as a Python literal (models write True and single quotes), and kept as a string where neither
fits, or where the schema does not allow what was read but does allow a string.

Source: the order of readings is that of vLLM's ``poolside_v1_tool_parser.py``; looking at what the schema
allows beyond "string" is ours.
"""

from __future__ import annotations

import ast
import json
import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

STRING_ONLY = frozenset({"string"})
ALL_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})
_DEEPEST_REFERENCE = 16
_COMBINED = ("anyOf", "oneOf", "allOf", "not", "if", "patternProperties", "dependentSchemas")
_LONGEST_LITERAL = 1 << 16  # of formatted strings Python's parser takes a second for twice that
_LONGEST_INTEGER = 10**4300  # Python writes no longer ones
_SAYS_NOTHING: Mapping[str, Any] = {}


class ToolSchemas:
    """The parameter schemas of the tools on offer, by name; immutable."""

    def __init__(self, tools: Iterable[Mapping[str, Any]] = ()):
        """Read tools in any of the shapes that clients send.

        Args:
            tools: ``{"function": {"name", "parameters"}}``, or the function itself, with its schema under
                ``parameters`` or ``input_schema``.
        """
        self._parameters: dict[str, Mapping[str, Any]] = {}
        self._known_types: dict[int, frozenset[str]] = {}
        for tool in tools:
            function = tool.get("function", tool)
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                schema = function.get("parameters", function.get("input_schema"))
                self._parameters[function["name"]] = schema if isinstance(schema, Mapping) else {}

    def __len__(self) -> int:
        """Return how many tools there are."""
        return len(self._parameters)

    def __contains__(self, name: object) -> bool:
        """Return whether a tool of this name is on offer."""
        return name in self._parameters

    @property
    def names(self) -> tuple[str, ...]:
        """The tools, in the order given."""
        return tuple(self._parameters)

    def root(self, tool: str) -> Mapping[str, Any]:
        """Return a tool's whole schema; empty for an unknown tool."""
        return self._parameters.get(tool, {})

    def properties(self, tool: str) -> Mapping[str, Any]:
        """Return the schemas of a tool's arguments, by name."""
        found = _resolved(self.root(tool), self.root(tool)).get("properties")
        return found if isinstance(found, Mapping) else {}

    def required(self, tool: str) -> frozenset[str]:
        """Return the arguments that a call must have."""
        found = _resolved(self.root(tool), self.root(tool)).get("required")
        return (
            frozenset(name for name in found if isinstance(name, str))
            if isinstance(found, list)
            else frozenset()
        )

    def argument(self, tool: str, argument: str) -> Mapping[str, Any]:
        """Return an argument's schema, references followed; empty where it says nothing."""
        schema = self.properties(tool).get(argument)
        return _resolved(schema, self.root(tool)) if isinstance(schema, Mapping) else {}

    def lengths(self, tool: str, argument: str) -> tuple[int, int | None]:
        """Return the least and the most characters of an argument that is a string and nothing else."""
        if self.types(tool, argument) != STRING_ONLY:
            return 0, None
        schema = self.argument(tool, argument)
        least, most = (_count(schema.get(key)) for key in ("minLength", "maxLength"))
        return least or 0, most

    def fault(self, tool: str) -> str | None:
        """Return why arguments cannot be made to follow a tool's schema, or None where they can."""
        root = self.root(tool)
        for target in _references(root):
            if not _resolved({"$ref": target}, root) and target not in ("#", "#/"):
                return f"'$ref' {target!r} is not in it"
        schema = _resolved(root, root)
        if schema.get("type", "object") not in ("object", ["object"]):
            return f"its 'type' must be 'object', found {schema['type']!r:.100}"
        for key in _COMBINED:
            if key in schema:
                return f"'{key}' beside the 'properties' cannot be followed"
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping):
            return f"'properties' must be an object, found {properties!r:.100}"
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            return f"'required' must be a list of names, found {required!r:.100}"
        for name, part in properties.items():
            if not isinstance(part, Mapping) and part is not True:
                return f"the schema of {name!r} must be an object, found {part!r:.100}"
        if missing := [name for name in required if name not in properties]:
            return f"'required' names {missing[0]!r}, which is not among its 'properties'"
        return None

    def types(self, tool: str, argument: str) -> frozenset[str]:
        """Return the JSON types allowed for an argument; all of them where the schema says nothing."""
        root = self.root(tool)
        schema = self.properties(tool).get(argument, root.get("additionalProperties"))
        return _allowed_types(schema, root, self._known_types)


def _allowed_types(
    schema: Any, root: Mapping[str, Any], known: dict[int, frozenset[str]], depth: int = 0
) -> frozenset[str]:
    """Return the JSON types that a schema allows; all where it does not say.

    Args:
        schema: Any JSON value; what is not an object allows everything.
        root: The document that ``$ref`` points into.
        known: Of parts of the document, by identity; references would have the same ones looked at again and
            again. One that leads back to itself says nothing.
        depth: Nesting so far.
    """
    if not isinstance(schema, Mapping) or depth > _DEEPEST_REFERENCE:
        return ALL_TYPES
    schema = _resolved(schema, root)
    if (found := known.get(id(schema))) is None:
        known[id(schema)] = ALL_TYPES
        found = known[id(schema)] = _declared_types(schema, root, known, depth)
    return found


def _declared_types(
    schema: Mapping[str, Any], root: Mapping[str, Any], known: dict[int, frozenset[str]], depth: int
) -> frozenset[str]:
    allowed = ALL_TYPES
    declared = schema.get("type")
    if isinstance(declared, str):
        allowed &= {declared}
    elif isinstance(declared, list):
        allowed &= {name for name in declared if isinstance(name, str)}
    if isinstance(schema.get("enum"), list):
        allowed &= {_type_of(value) for value in schema["enum"]}
    if "const" in schema:
        allowed &= {_type_of(schema["const"])}
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            allowed &= frozenset().union(*(_allowed_types(s, root, known, depth + 1) for s in schema[key]))
    if isinstance(schema.get("allOf"), list):
        for part in schema["allOf"]:
            allowed &= _allowed_types(part, root, known, depth + 1)
    return allowed or ALL_TYPES


def typed_value(text: str, types: frozenset[str]) -> Any:
    """Return the value that an argument's text stands for.

    Args:
        text: As the model wrote it.
        types: From `ToolSchemas.types`.

    Returns:
        A value that `json.dumps` writes as standard JSON.
    """
    if types == STRING_ONLY:
        return text
    read = _read(text.strip())
    if read is None:
        return text
    value = read[0]
    kind = _type_of(value)
    fits = kind in types or (kind == "integer" and "number" in types)
    return text if not fits and "string" in types else value


def _read(text: str) -> tuple[Any] | None:
    """Return the value of JSON text or of a Python literal, or None where it is neither."""
    try:
        value = json.loads(text)
        return (value,) if _is_json(value) else None
    except (ValueError, RecursionError):
        pass
    if len(text) > _LONGEST_LITERAL:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes in what a model wrote
            value = ast.literal_eval(text)
        return (value,) if _is_json(value) else None
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _is_json(value: Any) -> bool:
    """Return whether JSON can write a value and read back the same."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, list):
        return all(_is_json(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(key) and _is_json(item) for key, item in value.items())
    if isinstance(value, str):
        return not any("\ud800" <= character <= "\udfff" for character in value)
    if isinstance(value, int):
        return abs(value) < _LONGEST_INTEGER
    return value is None


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    for kind, name in (
        (bool, "boolean"),
        (str, "string"),
        (int, "integer"),
        (float, "number"),
        (Mapping, "object"),
    ):
        if isinstance(value, kind):
            return name
    return "array"


def _references(schema: Any) -> Iterable[str]:
    """Yield every ``$ref`` in a schema."""
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Mapping):
            if isinstance(node.get("$ref"), str):
                yield node["$ref"]
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node


def _count(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return int(value) if value >= 0 and value % 1 == 0 else None


def _resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Follow ``$ref`` within the document; one that leads nowhere says nothing about the type."""
    for _ in range(_DEEPEST_REFERENCE):
        target = schema.get("$ref")
        if not isinstance(target, str):
            break
        node: Any = root
        for part in target.removeprefix("#").split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            node = node.get(key) if isinstance(node, Mapping) else None
        if not target.startswith("#") or not isinstance(node, Mapping):
            return _SAYS_NOTHING
        schema = node
    return schema
