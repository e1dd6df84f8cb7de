"""Arguments become what their schema allows; strings stay what the model wrote."""

import json

import pytest

from lean_laguna.server.argument_types import ALL_TYPES, ToolSchemas, typed_value

PARAMETERS = {
    "$defs": {"Name": {"type": "string"}, "Loop": {"$ref": "#/$defs/Loop"}},
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "either": {"type": ["string", "integer"]},
        "by_name": {"$ref": "#/$defs/Name"},
        "loop": {"$ref": "#/$defs/Loop"},
        "lost": {"$ref": "#/$defs/None"},
        "colour": {"enum": ["red", "1"]},
        "fixed": {"const": 3},
        "both": {"allOf": [{"type": ["string", "null"]}, {"type": "string"}]},
        "odd": True,
    },
    "additionalProperties": {"type": "boolean"},
}


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}},
        {"type": "function", "name": "f", "parameters": PARAMETERS},
        {"name": "f", "input_schema": PARAMETERS},
    ],
)
def test_types_are_read_from_every_shape_of_tool(tool):
    tools = ToolSchemas([tool])
    assert len(tools) == 1
    assert "f" in tools
    expected = {
        "text": {"string"},
        "count": {"integer"},
        "maybe": {"string", "null"},
        "either": {"string", "integer"},
        "by_name": {"string"},
        "loop": ALL_TYPES,
        "lost": ALL_TYPES,
        "colour": {"string"},
        "fixed": {"integer"},
        "both": {"string"},
        "odd": ALL_TYPES,
        "unheard of": {"boolean"},
    }
    assert {name: tools.types("f", name) for name in expected} == expected
    assert tools.types("another", "text") == ALL_TYPES


@pytest.mark.parametrize(
    "tool",
    [{}, {"function": 3}, {"function": {"name": "f", "parameters": None}}, {"name": "f", "parameters": 1}],
)
def test_a_tool_without_a_schema_allows_everything(tool):
    assert ToolSchemas([tool]).types("f", "x") == ALL_TYPES


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("01234", {"string"}, "01234"),
        (" 7 ", {"string"}, " 7 "),
        (" 7 ", {"integer"}, 7),
        ("7", {"number"}, 7),
        ("7.5", {"integer"}, 7.5),
        ("seven", {"integer"}, "seven"),
        ("7", {"string", "null"}, "7"),
        ("null", {"string", "null"}, None),
        ("None", {"string", "null"}, None),
        ("true", {"string", "boolean"}, True),
        ("7", {"string", "integer"}, 7),
        ("False", ALL_TYPES, False),
        ("{'a': [1, None]}", ALL_TYPES, {"a": [1, None]}),
        ('{"a": [1, null]}\n', {"object"}, {"a": [1, None]}),
        ("(1, 2)", ALL_TYPES, "(1, 2)"),
        ("{1: 2}", ALL_TYPES, "{1: 2}"),
        ("NaN", ALL_TYPES, "NaN"),
        ("1e999", ALL_TYPES, "1e999"),
        ("'\\d'", ALL_TYPES, "\\d"),
        ('"\\ud800"', ALL_TYPES, '"\\ud800"'),
        ("", ALL_TYPES, ""),
        ("1" * 5000, ALL_TYPES, "1" * 5000),
        ("0x" + "f" * 5000, {"integer"}, "0x" + "f" * 5000),
        ("[-0b1" + "0" * 20_000 + "]", ALL_TYPES, "[-0b1" + "0" * 20_000 + "]"),
        ('{"\\ud800": 1}', ALL_TYPES, '{"\\ud800": 1}'),
        ("[{'\\udfff': 1}]", ALL_TYPES, "[{'\\udfff': 1}]"),
        ("f'" + "{a}" * 100_000 + "'", ALL_TYPES, "f'" + "{a}" * 100_000 + "'"),
        ("[" * 100_000, ALL_TYPES, "[" * 100_000),
        ("-" * 100_000 + "1", ALL_TYPES, "-" * 100_000 + "1"),
    ],
)
def test_text_becomes_what_is_allowed(text, types, value):
    found = typed_value(text, frozenset(types))
    assert (type(found), found) == (type(value), value)
    written = json.dumps(found, allow_nan=False, ensure_ascii=False).encode()
    assert json.loads(written) == value


def test_references_that_meet_again_and_again_cost_one_look_each():
    """Paths through this schema: 8**16, and as many more through the loop at its end."""
    levels = {f"n{i}": {"anyOf": [{"$ref": f"#/$defs/n{i + 1}"}] * 8} for i in range(16)}
    loop = {"anyOf": [{"$ref": "#/$defs/n16"}] * 8 + [{"type": "string"}]}
    schema = {"$defs": {**levels, "n16": loop}, "properties": {"a": {"$ref": "#/$defs/n0"}}}
    tools = ToolSchemas([{"name": "f", "parameters": schema}])
    assert tools.types("f", "a") == ALL_TYPES
    narrow = {**schema, "$defs": {**levels, "n16": {"type": "integer"}}}
    assert ToolSchemas([{"name": "f", "parameters": narrow}]).types("f", "a") == {"integer"}
