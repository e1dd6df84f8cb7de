"""A grammar allows exactly what its text allows, token by token, and walks back from drafts."""

import json
import sys

import numpy as np
import pytest
import tokenizers
from llguidance import LLParserLimits

from lean_laguna.core.errors import MissingDependencyError, RequestError
from lean_laguna.core.structured_outputs import StructuredOutputs
from lean_laguna.models.tokenizer import Tokenizer
from lean_laguna.spec.grammar import GrammarCompiler, grammar_text
from lean_laguna.spec.thinking import ThinkTags
from support.tokenizers import byte_level_json

VOCAB = 330  # rows beyond the tokenizer's tokens, as padded vocabularies have them
EOS = 2
ENDS = {EOS, 317}  # and the end of the assistant's turn


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(tokenizers.Tokenizer.from_str(byte_level_json()), (EOS,))


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer, VOCAB)


def allowed(constraint, drafts=()):
    scores = np.zeros((len(drafts) + 1, VOCAB))
    constraint.restrict(scores, list(drafts), 0)
    return [set(np.flatnonzero(np.isfinite(row)).tolist()) for row in scores]


def by_choice(tokenizer, choices, prefix):
    """Return what may follow, by looking at every token."""
    fits = {
        token
        for token in range(tokenizer.vocab_size)
        if token not in tokenizer.special_token_ids
        and (text := tokenizer.token_bytes(token))
        and any(choice.encode().startswith(prefix + text) for choice in choices)
    }
    return fits | (ENDS if prefix.decode("utf-8", "replace") in choices else set())


CHOICES = ["return a", "return b", "returns", "é☃", '"\\n"\n', "re", "a|b", "a.c", "(x)", "\\d", "a{2}", "^$"]


def test_rows_allow_what_a_look_at_every_token_allows(tokenizer, compiler):
    structured = StructuredOutputs(choice=CHOICES)
    for choice in CHOICES:
        drafts = tokenizer.encode(choice)
        constraint = compiler.constraint(structured, [], None)
        before = allowed(constraint)
        prefixes = [b"".join(map(tokenizer.token_bytes, drafts[:i])) for i in range(len(drafts) + 1)]
        expected = [by_choice(tokenizer, CHOICES, prefix) for prefix in prefixes]
        rows = allowed(constraint, drafts)
        for row, fits, draft in zip(rows, expected, [*drafts, EOS], strict=True):
            assert draft in row
            assert row == fits or (row < fits and len(row) == 1)  # one text is left: its usual tokens alone
        assert allowed(constraint) == before
        for token, row in zip(drafts, rows, strict=False):
            assert allowed(constraint) == [row]
            constraint.commit([token])
        assert allowed(constraint) == rows[-1:]
        constraint.commit([EOS])
        assert allowed(constraint) == [ENDS]


def test_thousands_of_choices_can_be_told_apart(tokenizer, compiler):
    choices = [f"option {i}" for i in range(2500)]
    constraint = compiler.constraint(StructuredOutputs(choice=choices), [], None)
    for choice in ("option 7", "option 2499"):
        tokens = tokenizer.encode(choice)
        rows = allowed(constraint, tokens)
        assert all(token in row for token, row in zip(tokens, rows, strict=False))
        assert EOS in rows[-1]
    assert EOS not in allowed(constraint, tokenizer.encode("option"))[-1]


def test_a_forbidden_draft_is_walked_back_from(tokenizer, compiler):
    constraint = compiler.constraint(StructuredOutputs(regex="ab+c"), [], None)
    a, b, c, d = (tokenizer.encode(text)[0] for text in "abcd")
    fresh = allowed(constraint)
    for drafts in ([a, b, d, b], [d], [EOS, a], [a, b, c, EOS, a], [-1, a], [a, -1, b], [0], [VOCAB - 1, a]):
        allowed(constraint, drafts)
        assert allowed(constraint) == fresh
    constraint.commit([a, b])
    assert allowed(constraint) == [{b, c}]


def test_grammar_begins_after_the_thinking(tokenizer, compiler):
    tags = ThinkTags.of(tokenizer)
    constraint = compiler.constraint(StructuredOutputs(regex="ab"), [tags.start_id], tags)
    a, b = (tokenizer.encode(text)[0] for text in "ab")
    everything = set(range(VOCAB)) - ENDS
    assert allowed(constraint, [b, tags.end_id, a]) == [everything, everything, {a}, {b}]
    constraint.commit([b, tags.end_id])
    assert allowed(constraint) == [{a}]
    at_once = compiler.constraint(StructuredOutputs(regex="ab"), [tags.start_id, tags.end_id], tags)
    assert allowed(at_once) == [{a}]


def test_what_must_come_is_foreseen(tokenizer, compiler):
    schema = {"type": "object", "properties": {"name": {"const": "x"}}, "required": ["name"]}
    schema["additionalProperties"] = False
    structured = StructuredOutputs(json=schema, disable_any_whitespace=True)
    constraint = compiler.constraint(structured, [], None)
    before = allowed(constraint)
    forced = constraint.forced_tokens(100)
    assert json.loads(tokenizer.decode(forced)) == {"name": "x"}
    assert constraint.forced_tokens(2) == forced[:2]
    assert allowed(constraint) == before
    assert all(token in row for token, row in zip(forced, allowed(constraint, forced), strict=False))
    constraint.commit(forced)
    assert allowed(constraint) == [ENDS]
    assert constraint.forced_tokens(5) == []


def test_the_grammar_outlasts_options_that_ban_all_it_allows(tokenizer, compiler):
    constraint = compiler.constraint(StructuredOutputs(regex="a"), [], None)
    scores = np.zeros((1, VOCAB))
    (a,) = tokenizer.encode("a")
    scores[0, a] = -np.inf
    constraint.restrict(scores, [], 0)
    assert np.flatnonzero(np.isfinite(scores[0])).tolist() == [a]


def test_of_what_the_grammar_allows_only_allowed_tokens_come(tokenizer, compiler):
    a, b, c = (tokenizer.encode(text)[0] for text in "abc")
    constraint = compiler.constraint(StructuredOutputs(regex="[abc]+"), [], None, [b, c])
    assert allowed(constraint, [b]) == [{b, c}] * 2  # the end too is not allowed
    constraint = compiler.constraint(StructuredOutputs(choice=["ab"]), [], None, [a, b])
    assert allowed(constraint, [a, b]) == [{a}, {b}, ENDS]  # nothing but the end fits
    constraint.commit([a, b, EOS])
    assert constraint.failure is None


def test_allowed_tokens_may_spell_a_text_in_another_way(tokenizer, compiler):
    long = next(
        token
        for token in range(tokenizer.vocab_size)
        if len(text := tokenizer.token_bytes(token)) > 1 and text.isalpha() and text.isascii()
    )
    text = tokenizer.token_bytes(long).decode()
    letters = [tokenizer.encode(letter)[0] for letter in text]
    assert tokenizer.encode(text) == [long]
    constraint = compiler.constraint(StructuredOutputs(choice=[text]), [], None, letters)
    assert allowed(constraint, letters) == [*({letter} for letter in letters), ENDS]


def test_tokens_that_contradict_the_grammar_are_refused_or_end_it_as_a_failure(tokenizer, compiler):
    a, b, c = (tokenizer.encode(text)[0] for text in "abc")
    structured = StructuredOutputs(regex="ab+c")
    with pytest.raises(RequestError, match="allowed_token_ids hold no token that structured_outputs can"):
        compiler.constraint(structured, [], None, [b, c])
    with pytest.raises(RequestError, match="allowed_token_ids: token id 330 is not in the vocabulary"):
        compiler.constraint(structured, [], None, [a, VOCAB])
    plain, drafting = (compiler.constraint(structured, [], None, [a, c]) for _ in range(2))
    assert allowed(drafting, [a, b, c])[:2] == [{a}, ENDS]
    assert allowed(plain) == [{a}]
    plain.commit([a])
    assert allowed(plain) == [ENDS]
    plain.commit([EOS])
    drafting.commit([a, EOS])
    for constraint in (plain, drafting):
        assert "allowed_token_ids hold no token that fits" in constraint.failure


@pytest.mark.parametrize(
    ("structured", "text"),
    [
        ({"json_object": True}, '{"a": [1, {"b": null}]}'),
        ({"json": {"type": "array", "items": {"type": "integer"}}}, "[1, 2]"),
        ({"grammar": 'start: "a" NUMBER\nNUMBER: /[0-9]+/'}, "a12"),
        ({"grammar": 'root ::= "a" [0-9]+'}, "a12"),
        ({"regex": r"\d{4}-\d\d"}, "2026-11"),
    ],
)
def test_every_kind_of_constraint_is_followed(tokenizer, compiler, structured, text):
    constraint = compiler.constraint(StructuredOutputs.from_dict(structured), [], None)
    tokens = tokenizer.encode(text)
    rows = allowed(constraint, tokens)
    assert all(token in row for token, row in zip(tokens, rows, strict=False))
    assert EOS in rows[-1]
    assert EOS not in rows[0]
    (wrong,) = tokenizer.encode("z")
    assert wrong not in rows[0]


@pytest.mark.parametrize(
    "structured",
    [
        {"json": "{"},
        {"json": {"type": "strange"}},
        {"regex": "(a"},
        {"grammar": "start: nothing"},
        {"grammar": "::="},
    ],
)
def test_what_cannot_be_followed_is_refused_before_any_token(compiler, structured):
    structured = StructuredOutputs.from_dict(structured)
    with pytest.raises(RequestError, match="structured_outputs") as refused:
        compiler.constraint(structured, [], None)
    assert refused.value.param == "structured_outputs"


def test_a_grammar_that_is_given_up_on_ends_as_a_failure_with_and_without_drafts(tokenizer):
    ambiguous = StructuredOutputs(grammar='start: e\ne: e e e | e e | "a" | "b"')
    a, b = (tokenizer.encode(text)[0] for text in "ab")
    for limits in (LLParserLimits(max_items_in_row=40), LLParserLimits(step_max_items=100)):
        compiler = GrammarCompiler(tokenizer, VOCAB, limits)
        plain = compiler.constraint(ambiguous, [], None)
        said = []
        while (row := allowed(plain)[0]) != ENDS:
            assert {a, b} <= row
            said.append((a, b)[len(said) % 2])
            plain.commit(said[-1:])
        assert 1 <= len(said) < 60
        drafting = compiler.constraint(ambiguous, [], None)
        rows = allowed(drafting, [*said, a])
        assert ENDS not in rows[: len(said)]
        assert rows[len(said)] == ENDS
        drafting.commit(said)
        for constraint in (plain, drafting):
            assert constraint.failure is None
            constraint.commit([EOS, EOS])
            assert "cannot be followed any further" in constraint.failure
    satisfied = compiler.constraint(StructuredOutputs(regex="ab"), [], None)
    satisfied.commit([a, b, EOS])
    assert satisfied.failure is None


def test_a_missing_package_is_named_with_its_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'lean-laguna\[structured\]'"):
        grammar_text(StructuredOutputs(regex="a"))


def test_a_matcher_is_made_once_and_shared_by_no_two_completions(compiler):
    first = compiler.constraint(StructuredOutputs(regex="xy"), [], None)
    first.commit(sorted(allowed(first)[0])[:1])
    second = compiler.constraint(StructuredOutputs(regex="xy"), [], None)
    assert allowed(first) != allowed(second)
