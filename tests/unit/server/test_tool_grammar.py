"""A reply that must call a tool does, with arguments that follow the schema, whatever the model likes."""

import itertools
import json
import random
import re

import numpy as np
import pytest

from lean_laguna.core.errors import RequestError
from lean_laguna.core.types import SamplingParams
from lean_laguna.models.catalog import ASSETS
from lean_laguna.models.tokenizer import Tokenizer
from lean_laguna.server.reply_events import Reply
from lean_laguna.server.reply_parser import ReplyParser
from lean_laguna.server.tool_grammar import forced_calls
from lean_laguna.spec.grammar import GrammarCompiler
from support.decoding import ToyTarget, decode, forced_drafter, new_request, random_drafter

VOCAB = 4096
OPTIONS = {"type": "object", "properties": {"deep": {"type": "boolean"}}, "required": ["deep"]}
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F"]},
        "options": {"$ref": "#/$defs/Options"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["city", "days"],
    "$defs": {"Options": OPTIONS},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
NOW = {"type": "function", "function": {"name": "now"}}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_dir(ASSETS / "laguna-nano")


class CallingTarget(ToyTarget):
    """Likes to close values and calls, more than chance has it."""

    def __init__(self, tokenizer, salt):
        super().__init__(VOCAB, salt)
        closing = tokenizer.encode("</arg_value>")
        self.following = dict(itertools.pairwise(closing))
        self.favoured = [closing[0], *tokenizer.encode("\n</tool_call>"), *tokenizer.eos_token_ids]

    def row(self, tokens):
        scores = super().row(tokens)
        scores[self.favoured] += 8
        if tokens[-1] in self.following:
            scores[self.following[tokens[-1]]] += 20
        return scores


def check_call(call):
    arguments = json.loads(call.arguments)
    assert call.is_complete
    if call.name == "now":
        assert arguments == {}
        return
    assert call.name == "weather"
    assert {"city", "days"} <= set(arguments) <= set(WEATHER["properties"])
    assert isinstance(arguments["city"], str)
    assert arguments["days"] in range(1, 10)
    assert arguments.get("unit", "C") in ("C", "F")
    assert isinstance(arguments.get("options", {"deep": True})["deep"], bool)


@pytest.mark.parametrize("line_layout", [False, True], ids=["one line", "lines"])
@pytest.mark.parametrize("choice", ["required", NOW, {"type": "function", "name": "weather"}], ids=str)
def test_a_forced_reply_is_calls_and_nothing_else(tokenizer, choice, line_layout):
    structured = forced_calls(TOOLS, choice, tokenizer, line_layout=line_layout)
    compiler = GrammarCompiler(tokenizer, VOCAB)
    num_stopped = 0
    for seed in range(4):
        target = CallingTarget(tokenizer, seed)
        params = SamplingParams(temperature=seed % 2, max_tokens=120, structured_outputs=structured)

        def fresh(params=params, target=target, seed=seed):
            constraint = compiler.constraint(structured, [], None)
            eos = tokenizer.eos_token_ids
            return new_request(target, [70], params, seed=seed, eos_token_ids=eos, constraints=[constraint])

        plain = decode(target, fresh())
        for drafter in (forced_drafter(15), random_drafter(VOCAB, 3, random.Random(seed))):
            assert decode(target, fresh(), drafter).outcome() == plain.outcome()
        parser = ReplyParser(TOOLS, line_layout=line_layout)
        events = parser.push(tokenizer.decode(plain.token_ids, skip_special_tokens=True))
        reply = Reply.from_events(events + parser.finish(plain.finish_reason))
        assert reply.reasoning is None
        assert reply.content is None
        if plain.finish_reason == "stop":
            num_stopped += 1
            assert parser.finish_reason("stop") == "tool_calls"
            for call in reply.tool_calls:
                check_call(call)
            if choice != "required":
                assert [call.name for call in reply.tool_calls] == [choice.get("function", choice)["name"]]
    assert num_stopped >= 2


def test_one_call_only_where_parallel_calls_are_off(tokenizer):
    compiler = GrammarCompiler(tokenizer, VOCAB)
    for parallel in (True, False):
        structured = forced_calls(TOOLS, "required", tokenizer, parallel=parallel)
        constraint = compiler.constraint(structured, [], None)
        twice = tokenizer.encode("<tool_call>now</tool_call>") * 2
        assert constraint._matcher.validate_tokens(twice) == (len(twice) if parallel else len(twice) // 2)


LENGTHS = {
    "any": ({}, {"": True, "abcd": True, "x" * 3000: True}),
    "most": ({"maxLength": 3}, {"": True, "é한😀": True, "abcd": False, "<b>": True}),
    "none": ({"maxLength": 0}, {"": True, "a": False}),
    "least": ({"minLength": 2}, {"": False, "a": False, "é한": True, "x" * 3000: True}),
    "both": ({"minLength": 2, "maxLength": 3.0}, {"a": False, "ab": True, "abc": True, "abcd": False}),
    "hopeless": ({"minLength": 3, "maxLength": 2}, {"ab": False, "abc": True, "abcd": False}),
    "no numbers": ({"minLength": "2", "maxLength": None}, {"": True, "abcd": True}),
    "long": ({"minLength": 10**6, "maxLength": 10**15}, {"": False, "x" * 3000: True}),
    "or null": ({"type": ["string", "null"], "maxLength": 2}, {"null": True, "ab": True}),
    "digits": ({"pattern": "^[0-9]{3}$"}, {"123": True, "12": False, "1234": False, "": False}),
    "a slash": ({"pattern": "^/"}, {"/tmp/x": True, "tmp": False, "a/b": False}),
    "anywhere": ({"pattern": "b+$"}, {"ab": True, "abb": True, "ba": False}),
    "a dollar": ({"pattern": r"^\$"}, {"$": True, "$$ and more": True, "a": False}),
    "either": ({"pattern": "^(a|b)$"}, {"a": True, "b": True, "c": False}),
    "and length": ({"pattern": "x", "maxLength": 3}, {"axb": True, "axbc": False, "abc": False}),
    "one": ({"const": "left"}, {"left": True, "right": False}),
    "some": ({"$ref": "#/$defs/Side"}, {"left": True, "right": True, "up": False}),
    "elsewhere": ({"$ref": "#/$defs/Short"}, {"abc": True, "abcd": False}),
}


@pytest.mark.parametrize(("limits", "texts"), LENGTHS.values(), ids=LENGTHS)
def test_strings_have_the_length_that_their_schema_asks_for(tokenizer, limits, texts):
    properties = {"a": {**({} if "$ref" in limits else {"type": "string"}), **limits}}
    parameters = {"properties": properties, "required": ["a"]}
    side = {"type": "string", "enum": ["left", "right"]}
    parameters["$defs"] = {"Short": {"type": "string", "maxLength": 3}, "Side": side}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    compiler = GrammarCompiler(tokenizer, VOCAB)
    for text, is_right in texts.items():
        constraint = compiler.constraint(forced_calls([tool], "required", tokenizer), [], None)
        call = f"<tool_call>f<arg_key>a</arg_key><arg_value>{text}</arg_value></tool_call>"
        tokens = tokenizer.encode(call)
        assert (constraint._matcher.validate_tokens(tokens) == len(tokens)) == is_right, text
        constraint.restrict(np.zeros((1, VOCAB)), [], 0)
        assert not constraint._matcher.is_error()


@pytest.mark.parametrize("choice", [{"type": "function", "function": {"name": "fly"}}, {}, "anything"])
def test_a_name_that_is_not_on_offer_is_refused(tokenizer, choice):
    with pytest.raises(RequestError, match="not among the tools: weather, now") as refused:
        forced_calls(TOOLS, choice, tokenizer)
    assert refused.value.param == "tool_choice"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"$ref": "#/nowhere"}, "'$ref' '#/nowhere' is not in it"),
        ({"$ref": "http://example.com/x"}, "'$ref' 'http://example.com/x' is not in it"),
        ({"properties": {"a": {"items": {"$ref": "#/$defs/b"}}}, "$defs": {}}, "'$ref' '#/$defs/b'"),
        ({"type": "string"}, "its 'type' must be 'object', found 'string'"),
        ({"properties": [1]}, "'properties' must be an object"),
        ({"properties": {"a": 5}}, "the schema of 'a' must be an object, found 5"),
        ({"properties": {"a": {}}, "required": "a"}, "'required' must be a list of names"),
        ({"properties": {}, "required": ["a"]}, "'required' names 'a', which is not among"),
        ({"anyOf": [{"properties": {}, "required": ["a"]}]}, "'anyOf' beside the 'properties'"),
    ],
)
def test_a_schema_that_no_call_could_be_made_to_follow_is_refused(tokenizer, parameters, message):
    tools = [*TOOLS, {"type": "function", "function": {"name": "odd", "parameters": parameters}}]
    with pytest.raises(RequestError, match=re.escape(message)) as refused:
        forced_calls(tools, "required", tokenizer)
    assert refused.value.param == "tools"
    forced_calls(tools, NOW, tokenizer)  # another one's is nobody's concern


@pytest.mark.parametrize("schema", [True, {"$ref": "#"}, {}])
def test_a_schema_that_says_nothing_and_one_that_holds_itself_can_be_followed(tokenizer, schema):
    parameters = {"type": "object", "properties": {"a": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    structured = forced_calls([tool], "required", tokenizer)
    GrammarCompiler(tokenizer, VOCAB).constraint(structured, [], None)
