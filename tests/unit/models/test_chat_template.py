import json

import pytest
import tokenizers
from tokenizers import models

from lean_laguna.core.errors import CheckpointError, RequestError
from lean_laguna.models.chat_template import ChatTemplate, check_role_tokens, starts_in_thinking
from lean_laguna.models.tokenizer import Tokenizer
from support.templates import SOURCES
from support.tokenizers import byte_level_json

BOS = {"bos_token": "〈|EOS|〉"}
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Sum <b>1 & 2</b>?"}
CALL = {"function": {"name": "add", "arguments": {"a": 1, "b": "2", "unit": {"名": "é<"}}}}
ASSISTANT = {"role": "assistant", "content": "3", "reasoning": "easy", "tool_calls": [CALL]}
TOOL = {"type": "function", "function": {"name": "add", "description": "größe & <sum>"}}


def template(name, **kwargs):
    return ChatTemplate(SOURCES[name], special_tokens=BOS, **kwargs)


def test_the_early_layout_puts_tags_on_their_own_lines():
    text = template("early").render([SYSTEM, USER, ASSISTANT, USER])
    assert text == (
        "〈|EOS|〉<system>\n\nBe brief.\n</system>\n<user>\nSum <b>1 & 2</b>?\n</user>\n"
        "<assistant>\n<think>\neasy\n</think>\n3\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
        "<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n<arg_key>unit</arg_key>\n"
        '<arg_value>{"名": "é<"}</arg_value>\n</tool_call>\n</assistant>\n'
        "<user>\nSum <b>1 & 2</b>?\n</user>\n<assistant>\n</think>"
    )


def test_the_later_layout_has_no_line_breaks_inside_turns():
    text = template("later").render([SYSTEM, USER, ASSISTANT, USER], enable_thinking=True)
    assert text == (
        "〈|EOS|〉<system>Be brief.</system>\n<user>Sum <b>1 & 2</b>?</user>\n"
        "<assistant><think>easy</think>3<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value>"
        "<arg_key>b</arg_key><arg_value>2</arg_value>"
        '<arg_key>unit</arg_key><arg_value>{"名": "é<"}</arg_value>'
        "</tool_call></assistant>\n<user>Sum <b>1 & 2</b>?</user>\n<assistant><think>"
    )


def test_an_empty_system_message_suppresses_the_default_one():
    assert "made by Poolside" in template("later").render([USER])
    assert "<system>" not in template("later").render([{"role": "system", "content": ""}, USER])


@pytest.mark.parametrize("name", SOURCES)
def test_tools_are_written_as_plain_json_without_escapes(name):
    text = template(name).render([USER], tools=[TOOL])
    assert json.dumps(TOOL, ensure_ascii=False) in text
    assert "\\u" not in text
    assert "&amp;" not in text


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [({}, False), ({"enable_thinking": False}, False), ({"enable_thinking": True}, True)],
)
@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_thinking_is_read_off_the_rendered_prompt(name, kwargs, expected, tools):
    messages = [{"role": "user", "content": "what does <think> or <assistant><think> mean?"}]
    assert starts_in_thinking(template(name).render(messages, tools=tools, **kwargs)) is expected


def test_the_checkpoint_s_own_switches_apply_unless_the_call_says_otherwise():
    later = template("later", default_kwargs={"enable_thinking": True})
    assert ChatTemplate.starts_in_thinking(later.render([USER]))
    assert not ChatTemplate.starts_in_thinking(later.render([USER], enable_thinking=False))


def test_a_reply_continued_in_its_thinking_counts_as_thinking_and_a_finished_one_does_not():
    assert starts_in_thinking("<user>x</user>\n<assistant><think>so far")
    assert starts_in_thinking("plain prompt <think>\n")
    assert not starts_in_thinking("<assistant><think>a</think>b")
    assert not starts_in_thinking("<user><think></user>")
    assert not starts_in_thinking("")


@pytest.mark.parametrize("name", SOURCES)
def test_a_template_s_refusal_is_a_request_error(name):
    with pytest.raises(RequestError, match="unknown role judge"):
        template(name).render([{"role": "judge", "content": "x"}])


@pytest.mark.parametrize("messages", [[], "hello", [{"content": "x"}], ["x"]])
def test_messages_of_the_wrong_shape_are_refused(messages):
    with pytest.raises(RequestError, match="messages"):
        template("later").render(messages)


def test_content_of_a_wrong_type_is_a_request_error_not_a_traceback():
    with pytest.raises(RequestError, match="chat template failed"):
        template("later").render([{"role": "user", "content": 7}])


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__.__base__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(attack):
    with pytest.raises(RequestError):
        ChatTemplate(attack).render([USER])


def test_the_names_hugging_face_gives_are_there():
    source = "{{ strftime_now('%Y') | int > 2000 }}{{ {'a': 1} | tojson(indent=1) }}"
    source += "{% for i in [1, 2, 3] %}{% break %}{% endfor %}"
    assert ChatTemplate(source).render([USER]) == 'True{\n "a": 1\n}'


def test_a_broken_template_names_file_and_line(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("line\n{% if %}")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: not a valid template, line 2"):
        ChatTemplate.from_dir(tmp_path)


def test_the_file_wins_over_the_config_and_the_config_gives_the_tokens(tmp_path):
    config = {
        "bos_token": {"content": "〈|EOS|〉"},
        "eos_token": "<e>",
        "chat_template": "config {{ eos_token }}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.from_dir(tmp_path).render([USER]) == "config <e>"
    (tmp_path / "chat_template.jinja").write_text("file {{ bos_token }}")
    assert ChatTemplate.from_dir(tmp_path).render([USER]) == "file 〈|EOS|〉"


def test_one_of_several_embedded_templates_is_the_default(tmp_path):
    several = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert ChatTemplate.from_dir(tmp_path).render([USER]) == "d"


def test_a_checkpoint_s_template_arguments_are_read(tmp_path):
    (tmp_path / "chat_template.jinja").write_text(SOURCES["later"])
    (tmp_path / "generation_config.json").write_text(
        '{"default_chat_template_kwargs": {"enable_thinking": true}}'
    )
    assert ChatTemplate.from_dir(tmp_path).render([USER]).endswith("<assistant><think>")


def test_no_template_at_all_says_where_one_belongs(tmp_path):
    with pytest.raises(CheckpointError, match=r"no chat template; expected chat_template\.jinja"):
        ChatTemplate.from_dir(tmp_path)


def test_a_turn_end_that_is_no_token_is_refused():
    good = Tokenizer(tokenizers.Tokenizer.from_str(byte_level_json()))
    check_role_tokens(template("later"), good, "here")
    other = Tokenizer(tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[])))
    with pytest.raises(CheckpointError, match="</assistant>, which is not a token"):
        check_role_tokens(template("later"), other, "here")


def test_a_template_that_is_not_text_is_named(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: cannot be read as UTF-8 text"):
        ChatTemplate.from_dir(tmp_path)


def test_arithmetic_that_fails_in_a_template_is_the_templates_fault():
    with pytest.raises(RequestError, match="failed on the messages"):
        ChatTemplate("{{ 1 / 0 }}").render([USER])


def test_an_editor_s_mark_at_the_start_is_no_part_of_the_prompt(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes("file {{ messages[0].content }}".encode("utf-8-sig"))
    assert ChatTemplate.from_dir(tmp_path).render([USER]) == f"file {USER['content']}"


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_link_to_a_file_that_never_came_is_no_reason_to_take_another(name, tmp_path):
    (tmp_path / "chat_template.jinja").write_text("file")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "config"}))
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to(tmp_path / "blobs" / "abc")
    with pytest.raises(CheckpointError, match=rf"{name}: .*No such file"):
        ChatTemplate.from_dir(tmp_path)
