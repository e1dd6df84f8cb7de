"""Every split of a reply into deltas gives what the whole gives, and the whole is what a client expects."""

import itertools
import json
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lean_laguna.models.chat_template import ChatTemplate
from lean_laguna.server.reply_events import ContentDelta, Reply, ToolCallArguments, ToolCallEnd, merged
from lean_laguna.server.reply_parser import ReplyParser, new_call_id
from support.templates import SOURCES


def tool(name, **properties):
    return {"type": "function", "function": {"name": name, "parameters": {"properties": properties}}}


TOOLS = [
    tool("weather", city={"type": "string"}, days={"type": "integer"}, zip={"type": "string"}),
    tool("edit", path={"type": "string"}, text={"type": "string"}, lines={"type": "array"}),
    tool("now"),
]


def call(name, *arguments, end="</tool_call>"):
    pairs = (f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in arguments)
    return f"<tool_call>{name}{''.join(pairs)}{end}"


class Case(NamedTuple):
    text: str
    reasoning: str | None = None
    content: str | None = None
    calls: tuple = ()
    thinking: bool = False
    lines: bool = False
    tools: object = TOOLS
    reason: str = "stop"
    told: str = "stop"


def done(name, **arguments):
    return name, json.dumps(arguments, ensure_ascii=False), True


PARIS = call("weather", ("city", "Paris"))
CASES = {
    "empty": Case(""),
    "plain": Case("Hello.", content="Hello."),
    "white space is an answer": Case(" \n", content=" \n"),
    "thinking": Case("I see.</think>Yes.", "I see.", "Yes.", thinking=True),
    "thinking that never ends": Case("I see", "I see", thinking=True),
    "thinking cut inside its tag": Case(
        "I see</thi", "I see</thi", thinking=True, reason="length", told="length"
    ),
    "thinking keeps line breaks": Case("\nI\n</think>\nYes", "\nI\n", "\nYes", thinking=True),
    "thinking on its own lines": Case("\nI\n</think>\nYes\n", "I", "Yes\n", thinking=True, lines=True),
    "empty thinking on its own lines": Case("\n</think>\nYes", None, "Yes", thinking=True, lines=True),
    "answer on its own lines": Case("\nYes\n\n", content="Yes\n\n", lines=True),
    "opening tag repeated": Case("<think>I see.</think>Yes.", "I see.", "Yes.", thinking=True),
    "opening tag not in the prompt": Case("<think>I see.</think>Yes.", "I see.", "Yes."),
    "closing tag though thinking is off": Case("</think>Yes.", content="Yes."),
    "closing tag repeated": Case("I</think>\n</think>Yes.", "I", "Yes.", thinking=True),
    "thinking again before the answer": Case("</think><think>I</think>Yes.", "I", "Yes.", thinking=True),
    "empty pair, then thinking": Case("<think></think>\n<think>I</think>Y", "I", "Y", thinking=True),
    "tags in an answer are text": Case("A <think>b</think>", content="A <think>b</think>"),
    "tag in the thinking": Case("a <think> b</think>c", "a <think> b", "c", thinking=True),
    "less-than signs": Case("a < b <= c << d", content="a < b <= c << d"),
    "half a tag at the end": Case("x <tool_ca", content="x <tool_ca"),
    "call without arguments": Case(call("now"), calls=(done("now"),), told="tool_calls"),
    "call on several lines": Case(
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>\n",
        calls=(done("weather", city="Paris"),),
        told="tool_calls",
    ),
    "thinking, text and call": Case(
        "I</think>Look: \n" + PARIS,
        "I",
        "Look: \n",
        (done("weather", city="Paris"),),
        True,
        told="tool_calls",
    ),
    "blank before a call is no content": Case(
        "</think>\n\n" + PARIS, None, None, (done("weather", city="Paris"),), True, told="tool_calls"
    ),
    "parallel calls": Case(
        PARIS + "\n" + call("now") + call("weather", ("city", "Rom"), ("days", "3")),
        calls=(done("weather", city="Paris"), done("now"), done("weather", city="Rom", days=3)),
        told="tool_calls",
    ),
    "text after a call": Case(
        PARIS + "\nWait.", None, "\nWait.", (done("weather", city="Paris"),), told="tool_calls"
    ),
    "call in the thinking": Case(f"a{PARIS}b</think>c", f"a{PARIS}b", "c", thinking=True),
    "no tools": Case(PARIS, content=PARIS, tools=()),
    "unknown tool": Case(
        call("fly", ("to", "Mars"), ("speed", "1e3"), ("safe", "True")),
        calls=(done("fly", to="Mars", speed=1000.0, safe=True),),
        told="tool_calls",
    ),
    "unknown argument": Case(
        call("now", ("zone", " UTC ")), calls=(done("now", zone=" UTC "),), told="tool_calls"
    ),
    "digits for a string": Case(
        call("weather\n", ("zip", "01234"), ("days", "05")),
        calls=(done("weather", zip="01234", days="05"),),
        told="tool_calls",
    ),
    "white space of strings": Case(
        call("edit", ("text", "    if x:\n\ty()\n\n"), ("path", " a ")),
        calls=(done("edit", text="    if x:\n\ty()\n\n", path=" a "),),
        told="tool_calls",
    ),
    "quotes, escapes, other scripts": Case(
        call("edit", ("text", '"\\n"\n\t\x01é한😀</>')),
        calls=(done("edit", text='"\\n"\n\t\x01é한😀</>'),),
        told="tool_calls",
    ),
    "empty string": Case(call("edit", ("text", "")), calls=(done("edit", text=""),), told="tool_calls"),
    "tags inside a string": Case(
        call(
            "edit", ("text", "a</arg_value>b</tool_call>c<tool_call>d<arg_key>e</arg_value> f"), ("path", "p")
        ),
        calls=(
            done("edit", text="a</arg_value>b</tool_call>c<tool_call>d<arg_key>e</arg_value> f", path="p"),
        ),
        told="tool_calls",
    ),
    "think tags inside a string": Case(
        call("edit", ("text", "</think><think>")),
        calls=(done("edit", text="</think><think>"),),
        told="tool_calls",
    ),
    "structured arguments": Case(
        call("edit", ("lines", '[1, {"a": "</b>"}]\n')),
        calls=(done("edit", lines=[1, {"a": "</b>"}]),),
        told="tool_calls",
    ),
    "repeated key": Case(
        call("weather", ("city", "Rom"), ("city", "Paris"), ("days", "1")),
        calls=(done("weather", city="Rom", days=1),),
        told="tool_calls",
    ),
    "missing opening value tag": Case(
        "<tool_call>weather<arg_key>city</arg_key>\nParis</arg_value></tool_call>",
        calls=(done("weather", city="Paris"),),
        told="tool_calls",
    ),
    "missing closing key tag": Case(
        "<tool_call>weather<arg_key>city<arg_value>Paris</arg_value></tool_call>",
        calls=(done("weather", city="Paris"),),
        told="tool_calls",
    ),
    "missing closing value tag": Case(
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Paris</tool_call>\n",
        calls=(done("weather", city="Paris"),),
        told="tool_calls",
    ),
    "missing closing value tag, cut": Case(
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Paris</tool_call>",
        calls=(("weather", '{"city": "Paris', False),),
        reason="length",
        told="length",
    ),
    "empty call": Case("a<tool_call> \n</tool_call>b", content="ab"),
    "a word about the tag": Case("Use <tool_call> to call.", content="Use <tool_call> to call."),
    "another syntax": Case(
        '<tool_call>{"name": "now"}\n</tool_call>', content='<tool_call>{"name": "now"}\n</tool_call>'
    ),
    "a tag, then a call": Case(
        "<tool_call>\na\n" + PARIS,
        None,
        "<tool_call>\na\n",
        (done("weather", city="Paris"),),
        told="tool_calls",
    ),
    "cut in the name": Case("<tool_call>wea", content="<tool_call>wea", reason="length", told="length"),
    "cut in a key": Case(
        "<tool_call>weather<arg_key>ci", calls=(("weather", "", False),), reason="length", told="length"
    ),
    "cut in a value": Case(
        PARIS + "<tool_call>weather<arg_key>city</arg_key><arg_value>Ro",
        calls=(done("weather", city="Paris"), ("weather", '{"city": "Ro', False)),
        reason="length",
        told="length",
    ),
    "cut before the closing tag": Case(
        call("weather", ("city", "Rom"), end=""),
        calls=(("weather", '{"city": "Rom', False),),
        reason="length",
        told="length",
    ),
    "stopped before the closing tag": Case(
        call("weather", ("city", "Rom"), end=""), calls=(("weather", '{"city": "Rom', False),)
    ),
    "cut after a call": Case(PARIS, calls=(done("weather", city="Paris"),), reason="length", told="length"),
    "call ends inside a key": Case(
        "<tool_call>weather<arg_key>ci</tool_call>", calls=(("weather", "", False),)
    ),
    "two thoughts, two calls, in one delta": Case(
        "a</think>b" + call("now") + call("now"),
        "a",
        "b",
        (done("now"), done("now")),
        True,
        told="tool_calls",
    ),
}


def parse(case, pieces):
    ids = itertools.count()
    parser = ReplyParser(
        case.tools, case.thinking, line_layout=case.lines, new_call_id=lambda: f"call_{next(ids)}"
    )
    events = [event for piece in pieces for event in parser.push(piece)]
    events += parser.finish(case.reason)
    return events, parser.finish_reason(case.reason)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_whole_reply_is_as_expected(case):
    events, told = parse(case, [case.text])
    reply = Reply.from_events(events)
    calls = tuple((c.name, c.arguments, c.is_complete) for c in reply.tool_calls)
    assert (reply.reasoning, reply.content, calls, told) == (
        case.reasoning,
        case.content,
        case.calls,
        case.told,
    )
    assert [c.id for c in reply.tool_calls] == [f"call_{i}" for i in range(len(calls))]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_split_gives_the_same_events(case):
    whole = merged(parse(case, [case.text])[0])
    for at in range(1, len(case.text)):
        assert merged(parse(case, [case.text[:at], case.text[at:]])[0]) == whole, case.text[:at]
    assert merged(parse(case, case.text)[0]) == whole


TAGS = ["think", "tool_call", "arg_key", "arg_value"]
FRAGMENTS = st.sampled_from(
    [f"<{tag}>" for tag in TAGS]
    + [f"</{tag}>" for tag in TAGS]
    + ["<", "</", ">", "weather", "edit", "text", "lines", "city", "a", "1", "true"]
    + ["\n", " ", "</arg", "_value>", "<tool", "{", '"']
)


@settings(max_examples=400)
@given(
    fragments=st.lists(FRAGMENTS, max_size=24),
    cuts=st.lists(st.integers(0, 200), max_size=8),
    thinking=st.booleans(),
    lines=st.booleans(),
    reason=st.sampled_from(["stop", "length"]),
)
def test_any_text_in_any_pieces_gives_the_same_events(fragments, cuts, thinking, lines, reason):
    case = Case("".join(fragments), thinking=thinking, lines=lines, reason=reason)
    bounds = [0, *sorted(min(cut, len(case.text)) for cut in cuts), len(case.text)]
    whole, told = parse(case, [case.text])
    for pieces in (case.text, [case.text[a:b] for a, b in itertools.pairwise(bounds)]):
        events, told_in_pieces = parse(case, pieces)
        assert merged(events) == merged(whole)
        assert told_in_pieces == told
    for ended in (event.index for event in whole if isinstance(event, ToolCallEnd)):
        assert isinstance(json.loads(Reply.from_events(whole).tool_calls[ended].arguments), dict)


VALUES = {
    "text": st.text(st.characters(exclude_categories=["Cs"]))
    | st.sampled_from(["</arg_value>", "</tool_call>"]),
    "path": st.text("ab \n\"'\\<>/_argkeyvalue"),
    "lines": st.lists(st.integers() | st.text("ab<>/") | st.none() | st.booleans()),
}
REPLIES = st.fixed_dictionaries(
    {
        "reasoning": st.text("ab \n<>", max_size=8).map(str.strip),
        "content": st.text("ab \n<>", max_size=8).map(str.strip),
        "tool_calls": st.lists(st.fixed_dictionaries({}, optional=VALUES), max_size=3),
    }
)


@pytest.mark.parametrize("layout", SOURCES)
@settings(max_examples=60)
@given(reply=REPLIES)
def test_what_a_template_writes_is_read_back(layout, reply):
    """So that a client which sends a reply back gets the very same prompt, and its cached prefix."""
    template = ChatTemplate(SOURCES[layout], special_tokens={"bos_token": ""})
    question = [{"role": "user", "content": "?"}]
    answer = {"role": "assistant", "reasoning": reply["reasoning"], "content": reply["content"]}
    answer["tool_calls"] = [{"function": {"name": "edit", "arguments": a}} for a in reply["tool_calls"]]
    has_thoughts = bool(reply["reasoning"])
    prompt = template.render(question, TOOLS, enable_thinking=has_thoughts)
    whole = template.render(
        [*question, answer], TOOLS, add_generation_prompt=False, enable_thinking=has_thoughts
    )
    assert whole.startswith(prompt)
    parser = ReplyParser.for_prompt(prompt, TOOLS)
    events = parser.push(whole[len(prompt) :].rpartition("</assistant>")[0]) + parser.finish("stop")
    found = Reply.from_events(events)
    assert found.reasoning == (reply["reasoning"] or None)
    assert (found.content or "").strip() == reply["content"]
    assert [json.loads(call.arguments) for call in found.tool_calls] == reply["tool_calls"]
    assert parser.finish_reason("stop") == ("tool_calls" if reply["tool_calls"] else "stop")


def test_pieces_of_strings_are_reported_before_their_end():
    parser = ReplyParser(TOOLS)
    parser.push("<tool_call>edit<arg_key>text</arg_key><arg_value>one")
    assert parser.push(" two <") == [ToolCallArguments(0, " two ")]
    assert parser.push("three") == [ToolCallArguments(0, "<three")]
    assert parser.has_unfinished_call


def test_thinking_is_open_until_its_tag():
    parser = ReplyParser.for_prompt("<assistant>\n<think>")
    parser.push("\na")
    assert parser.is_thinking
    assert parser.push("\n</think>\nb") == [ContentDelta("b")]
    assert not parser.is_thinking


def test_call_ids_differ():
    assert new_call_id() != new_call_id()
    assert new_call_id().startswith("call_")
