import json
import os

import pytest
from tokenizers import Tokenizer

from lean_laguna.models.chat_template import ChatTemplate
from lean_laguna.train.tokenizer import (
    END_ASSISTANT_ID,
    END_THINK_ID,
    EOS_ID,
    chars_per_token,
    chat_document,
    save_tokenizer,
)
from support.training import VOCAB, write_data


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    return folder / "tokenizer"


@pytest.fixture(scope="module")
def tokenizer(folder):
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_ids_follow_laguna(tokenizer):
    expected = {
        2: "〈|EOS|〉", 9: "<|pad|>", 12: "<|mask|>", 18: "<think>", 19: "</think>", 23: "<assistant>",
        24: "</assistant>", 25: "<tool_call>", 26: "</tool_call>", 0: "<|reserved_0|>",
    }  # fmt: skip
    assert {i: tokenizer.id_to_token(i) for i in expected} == expected
    assert tokenizer.get_vocab_size() == VOCAB


@pytest.mark.parametrize(
    "text", ["def f(x):\n\n        return x\n", "naïve 😀 \t\r\n\x00 end  ", "  lead", "", "\U0001d4b3\n\n\n"]
)
def test_any_text_survives_and_its_characters_are_counted(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert sum(chars_per_token(tokenizer)[ids]) == len(text)


def test_a_line_break_takes_the_next_lines_indentation(tokenizer):
    pieces = tokenizer.encode("x:\n        return x\n").tokens
    assert "ĊĠĠĠĠĠĠĠĠ" in pieces


def test_thinking_and_tool_tokens_stay_visible_and_turn_ends_do_not(tokenizer):
    ids = tokenizer.encode("<think>a</think>b</assistant>").ids
    assert END_THINK_ID in ids
    assert END_ASSISTANT_ID in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>a</think>b"


def test_the_template_renders_what_the_model_was_trained_on(folder, tokenizer):
    template = ChatTemplate.from_dir(folder)
    messages = [
        {"role": "user", "content": "Sort a list"},
        {"role": "assistant", "content": "```python\nx.sort()\n```"},
    ]
    rendered = template.render(messages, add_generation_prompt=False)
    assert rendered == "〈|EOS|〉" + chat_document("Sort a list", "x.sort()")
    assert tokenizer.encode(rendered).ids[0] == EOS_ID
    prompt = template.render(messages[:1])
    assert rendered.startswith(prompt)
    assert prompt.endswith("<assistant></think>")


def test_the_template_writes_tools_calls_results_and_thinking(folder):
    template = ChatTemplate.from_dir(folder)
    call = {"function": {"name": "run", "arguments": {"path": "a.py", "count": 2}}}
    rendered = template.render(
        [
            {"role": "system", "content": "S"},
            {"role": "user", "content": "U"},
            {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "why"},
            {"role": "tool", "content": "R"},
        ],
        tools=[{"name": "run"}],
        enable_thinking=True,
    )
    assert "<system>S\n\n### Tools" in rendered
    assert '<available_tools>\n{"name": "run"}\n</available_tools></system>\n<user>U</user>\n' in rendered
    assert (
        "<assistant><think>why</think><tool_call>run<arg_key>path</arg_key><arg_value>a.py</arg_value>"
        in rendered
    )
    assert "<arg_value>2</arg_value></tool_call></assistant>\n<tool_response>R</tool_response>\n" in rendered
    assert rendered.endswith("<assistant><think>")


def test_generation_stops_at_both_ends(folder):
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [
        EOS_ID,
        END_ASSISTANT_ID,
    ]


def test_files_are_replaced_and_never_written_into(tokenizer, tmp_path):
    names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
    for name in names:
        (tmp_path / name).write_text("old")
        os.link(tmp_path / name, tmp_path / f"{name}.before")
    save_tokenizer(tokenizer, tmp_path, 128)
    assert [(tmp_path / f"{name}.before").read_text() for name in names] == ["old"] * 4
    assert Tokenizer.from_file(str(tmp_path / names[0])).to_str() == tokenizer.to_str()
