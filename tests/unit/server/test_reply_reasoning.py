"""Thinking is counted by the split that separates it, token by token."""

import pytest

from lean_laguna.models.catalog import ASSETS
from lean_laguna.models.tokenizer import Tokenizer
from lean_laguna.server.reply_reasoning import ReasoningCounter, ReasoningSplitter, has_line_layout, held_back


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_dir(ASSETS / "laguna-nano")


@pytest.mark.parametrize(
    ("text", "thinking", "thought"),
    [
        ("Let me see.</think>Yes, é😀.", True, "Let me see."),
        ("Let me see, é😀.", True, "Let me see, é😀."),
        ("Yes.", False, ""),
        ("</think>Yes. </think>", True, ""),
        ("a</think>\n<think>b", True, "a\n<think>b"),
    ],
)
def test_tokens_of_thinking_are_counted_however_they_come(tokenizer, text, thinking, thought):
    ids = tokenizer.encode(text)
    expected = len(tokenizer.encode(thought))
    for size in (1, 3, len(ids)):
        counter = ReasoningCounter(tokenizer, thinking)
        for start in range(0, len(ids), size):
            counter.push(ids[start : start + size])
        assert counter.num_tokens == expected - ("<think>" in thought)


def test_layout_is_read_off_the_prompt():
    assert has_line_layout("<user>\nx\n</user>\n<assistant>\n<think>")
    assert has_line_layout("<assistant>\n</think>")
    assert not has_line_layout("<assistant><think>")
    assert not has_line_layout("<assistant>\n")


def test_only_what_could_become_a_tag_is_held_back():
    assert held_back("a</thi", ("</think>",)) == 5
    assert held_back("a</think>", ("</think>",)) == 0
    assert held_back("<", ("</think>", "<tool_call>")) == 1


def test_nothing_can_start_the_thinking_again_once_the_answer_has_begun():
    splitter = ReasoningSplitter(True)
    assert splitter.push("a</think>\n") == [(True, "a")]
    assert not splitter.is_settled
    assert splitter.push("b<think>") == [(False, "\nb<think>")]
    assert splitter.is_settled
