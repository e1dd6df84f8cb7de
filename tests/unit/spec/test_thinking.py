"""Thinking is followed token by token, and a budget closes it softly, then hard."""

import numpy as np
import pytest
import tokenizers

from lean_laguna.models.tokenizer import Tokenizer
from lean_laguna.spec.thinking import MOST_ROWS, Thinking, ThinkingBudget, ThinkTags
from support.tokenizers import byte_level_json

START, END, TURN, BLANK, LINE, WORD, OTHER = range(7)
TAGS = ThinkTags(START, END, TURN, frozenset({BLANK, LINE}), frozenset({LINE}))
OPEN = [WORD, TURN, START]


def thinking_of(prompt, output):
    state = Thinking(TAGS.is_open_after(prompt))
    for token in output:
        state = state.after(token, TAGS)
    return state


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ([TURN, START], True),
        ([TURN, START, WORD], True),
        ([TURN, END], False),
        ([START, WORD, TURN], False),
        ([START, WORD], True),
        ([WORD], False),
        ([], False),
    ],
)
def test_only_the_last_turn_of_a_prompt_counts(prompt, is_open):
    assert TAGS.is_open_after(prompt) is is_open


@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [
        (OPEN, [], Thinking(True)),
        (OPEN, [WORD, LINE], Thinking(True, 2, ends_line=True)),
        (OPEN, [WORD, END], Thinking(False, 1)),
        (OPEN, [WORD, END, LINE, END, START, WORD], Thinking(True, 2)),
        (OPEN, [WORD, END, WORD, START, WORD], Thinking(False, 1, has_answer=True)),
        ([TURN, END], [BLANK, START, WORD], Thinking(True, 1)),
        ([TURN, END], [WORD, START], Thinking(False, 0, has_answer=True)),
    ],
)
def test_thinking_opens_and_closes_as_the_reply_parser_has_it(prompt, output, expected):
    assert thinking_of(prompt, output) == expected


def test_tags_are_read_off_a_tokenizer():
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(byte_level_json()), (2,))
    tags = ThinkTags.of(tokenizer)
    assert tokenizer.id_to_token(tags.start_id) == "<think>"
    assert tokenizer.id_to_token(tags.end_id) == "</think>"
    assert tags.line_end_ids < tags.blank_ids
    (newline,) = tokenizer.encode("\n")
    assert newline in tags.line_end_ids
    assert tokenizer.encode("a")[0] not in tags.blank_ids
    without = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    assert ThinkTags.of(Tokenizer(without)) is None


def closes(budget, prompt, output, drafts=()):
    """Return per row whether only the closing tag is left."""
    constraint = ThinkingBudget(budget, TAGS, prompt)
    constraint.commit(output)
    scores = np.zeros((len(drafts) + 1, 7))
    constraint.restrict(scores, list(drafts), 0)
    left = [np.flatnonzero(np.isfinite(row)).tolist() for row in scores]
    assert all(ids in ([END], list(range(7))) for ids in left)
    assert (constraint.forced_tokens(3) == [END]) == (left[0] == [END])
    return [ids == [END] for ids in left]


def test_budget_closes_at_its_end_and_at_line_ends_just_before():
    assert closes(0, OPEN, []) == [True]
    assert closes(16, OPEN, [WORD] * 13, [WORD] * 4) == [False, False, False, True, True]
    assert closes(16, OPEN, [WORD] * 12, [LINE, LINE, WORD]) == [False, False, True, False]
    assert closes(7, OPEN, [WORD] * 5, [LINE, WORD]) == [False, False, True]


def test_budget_leaves_alone_what_is_not_thinking():
    assert closes(0, [TURN, END], [WORD], [WORD]) == [False, False]
    assert closes(2, OPEN, [WORD, END, WORD], [START, WORD]) == [False, False, False]
    assert closes(2, OPEN, [WORD], [WORD, END, START]) == [False, True, False, True]


def test_rows_from_the_middle_of_a_block_are_the_same():
    constraint = ThinkingBudget(9, TAGS, OPEN)
    drafts = [WORD] * 7 + [LINE, WORD, END, WORD]
    whole = np.zeros((12, 7))
    constraint.restrict(whole, drafts, 0)
    for first in range(12):
        rows = np.zeros((12 - first, 7))
        constraint.restrict(rows, drafts, first)
        np.testing.assert_array_equal(rows, whole[first:])


def test_a_distant_budget_and_a_begun_answer_cost_nothing():
    assert not ThinkingBudget(10 * MOST_ROWS, TAGS, OPEN).is_active
    near = ThinkingBudget(MOST_ROWS, TAGS, OPEN)
    assert near.is_active
    near.commit([END, WORD])
    assert not near.is_active
