"""Output that follows a JSON schema, a regular expression, a choice or a grammar, with any drafter.

llguidance tells which tokens may follow a prefix; the walk over drafted rows, which leaves no trace where
they are rejected, is here. Where the grammar leaves one text only, llguidance allows its usual tokens alone,
so that a draft of them is always accepted.

Where the prompt leaves the thinking open, the grammar begins after it; until then only the end of the
sequence is withheld, since the answer that the grammar describes is yet to come.

Source: https://github.com/guidance-ai/llguidance (grammar syntax, masks).
"""

from __future__ import annotations

import importlib.util
import re
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lean_laguna.core.errors import MissingDependencyError, RequestError
from lean_laguna.core.structured_outputs import StructuredOutputs
from lean_laguna.models.tokenizer import Tokenizer
from lean_laguna.spec.request import check_vocabulary
from lean_laguna.spec.thinking import ThinkTags

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

PARAM = "structured_outputs"
# A weak model may go on with white space for ever, where JSON has no end to it.
SOME_SPACE = r"[\x20\x0A\x0D\x09]{1,64}"
_NUM_KEPT = 32


def grammar_text(structured: StructuredOutputs) -> str:
    """Return a request's constraint in llguidance's own form.

    Raises:
        RequestError: It cannot be read.
        MissingDependencyError: llguidance is not installed.
    """
    _require_llguidance()
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if structured.json is not None or structured.json_object:
        schema = '{"type": "object"}' if structured.json is None else structured.json
        space: Any = {"whitespace_flexible": False}
        if not structured.disable_any_whitespace:
            space = {"whitespace_flexible": True, "whitespace_pattern": SOME_SPACE}
        try:
            return LLMatcher.grammar_from_json_schema(schema, overrides=space)
        except ValueError as error:
            raise RequestError(f"{PARAM}.json is no JSON: {error}", param=PARAM) from None
    if structured.regex is not None:
        return LLMatcher.grammar_from_regex(structured.regex)
    if structured.choice is not None:
        # As one expression: of rules, a place of a grammar has room for some thousand only.
        return LLMatcher.grammar_from_regex("|".join(re.escape(text) for text in structured.choice))
    assert structured.grammar is not None
    try:
        return LLMatcher.grammar_from_lark(any_to_lark(structured.grammar))
    except Exception as error:  # the converter raises plain Exception
        raise RequestError(f"{PARAM}.grammar cannot be read: {error}", param=PARAM) from None


class GrammarCompiler:
    """Makes matchers over one tokenizer; owned by the engine, which asks from one thread."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, limits: LLParserLimits | None = None):
        """Prepare nothing yet: most engines never see a grammar.

        Args:
            tokenizer: The target's.
            vocab_size: V of the target, which may have more rows than the tokenizer has tokens.
            limits: What a step of the grammar may cost; None for llguidance's own.
        """
        self._limits = limits
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._backend: LLTokenizer | None = None
        self._matchers: OrderedDict[StructuredOutputs, LLMatcher] = OrderedDict()

    def constraint(
        self,
        structured: StructuredOutputs,
        prompt_token_ids: Sequence[int],
        tags: ThinkTags | None,
        allowed_token_ids: Sequence[int] | None = None,
    ) -> GrammarConstraint:
        """Return the constraint of one completion.

        Args:
            structured: What was asked for.
            prompt_token_ids: Tells whether the thinking is open.
            tags: The tokens of thinking, where the tokenizer has them.
            allowed_token_ids: The only tokens that the request allows; None for any.

        Raises:
            RequestError: The constraint cannot be followed, or no allowed token can begin what it asks for.
            MissingDependencyError: llguidance is not installed.
        """
        matcher = self._matchers.get(structured)
        if matcher is None:
            matcher = self._compile(structured)
            self._matchers[structured] = matcher
            if len(self._matchers) > _NUM_KEPT:
                self._matchers.popitem(last=False)
        self._matchers.move_to_end(structured)
        if allowed_token_ids is not None:
            check_vocabulary(allowed_token_ids, self._vocab_size, "allowed_token_ids")
        is_thinking = tags is not None and tags.is_open_after(prompt_token_ids)
        constraint = GrammarConstraint(
            matcher.deep_copy(),
            self._tokenizer.eos_token_ids,
            think_end_id=tags.end_id if tags is not None and is_thinking else None,
            allowed_token_ids=allowed_token_ids,
        )
        if allowed_token_ids is not None and not constraint.can_begin(self._vocab_size):
            raise RequestError(
                f"allowed_token_ids hold no token that {PARAM} can begin with: allow some, or leave one of "
                "the two out",
                param="allowed_token_ids",
            )
        return constraint

    def _compile(self, structured: StructuredOutputs) -> LLMatcher:
        text = grammar_text(structured)
        from llguidance import LLMatcher

        if self._backend is None:
            self._backend = _backend(self._tokenizer, self._vocab_size)
        matcher = LLMatcher(self._backend, text, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise RequestError(f"{PARAM} cannot be followed: {matcher.get_error().strip()}", param=PARAM)
        return matcher


class GrammarConstraint:
    """Keeps one completion within a grammar; a `Constraint`.

    Invariant: between calls the matcher has consumed the committed tokens since the grammar began, and no
    drafts; end-of-sequence tokens, which are not part of the grammar's text, are never given to it.

    A matcher may give up, where a grammar is so ambiguous that following it costs too much; or the request
    allows none of the tokens that fit. Then the sequence can only end, as a failure and at the same token
    with any drafter.

    Attributes:
        failure: Why it ended before the grammar was satisfied.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        eos_token_ids: Sequence[int],
        *,
        think_end_id: int | None = None,
        allowed_token_ids: Sequence[int] | None = None,
    ):
        """Start a completion.

        Args:
            matcher: Its own, at the grammar's start.
            eos_token_ids: What may come where the grammar is satisfied.
            think_end_id: The token after which the grammar begins; None where it begins at once.
            allowed_token_ids: The only tokens of the grammar's text, in the vocabulary; None for any.
        """
        self._matcher = matcher
        self._allowed_ids = None if allowed_token_ids is None else sorted(set(allowed_token_ids))
        self._eos_token_ids = tuple(eos_token_ids)
        self._think_end_id = think_end_id  # None once the grammar has begun
        self._has_ended = False
        self.failure: str | None = None

    @property
    def is_active(self) -> bool:
        """Always: some tokens never fit."""
        return True

    def commit(self, token_ids: Sequence[int]) -> None:
        """Take emitted tokens."""
        for token in token_ids:
            if self._think_end_id is not None:
                if token == self._think_end_id:
                    self._think_end_id = None
            elif self._has_ended:
                break
            elif token in self._eos_token_ids:
                self._has_ended = True
                self.failure = _failure(self._matcher)
            else:
                self._matcher.consume_token(token)

    def restrict(self, scores: NDArray[np.float64], draft_token_ids: Sequence[int], first_row: int) -> None:
        """Leave what the grammar allows; see `Constraint.restrict`."""
        num_indices = first_row + len(scores)
        # Drafts walk on a copy, which costs microseconds; rolling back does not work for every grammar.
        matcher = self._matcher.deep_copy() if num_indices > 1 else self._matcher
        think_end_id, has_ended = self._think_end_id, self._has_ended
        for index in range(num_indices):
            if index:
                draft = draft_token_ids[index - 1]
                if think_end_id is not None:
                    think_end_id = None if draft == think_end_id else think_end_id
                elif draft in self._eos_token_ids:
                    has_ended = True
                elif has_ended or draft < 0 or not matcher.validate_tokens([draft]):
                    break  # nothing stands after a draft that the grammar forbids
                else:
                    matcher.consume_token(draft)
            if index < first_row:
                continue
            if think_end_id is None:
                self._mask(scores[index - first_row], matcher, has_ended)
            else:
                scores[index - first_row, list(self._eos_token_ids)] = -np.inf

    def forced_tokens(self, limit: int) -> list[int]:
        """Return what the grammar's text must go on with, as the tokenizer would write it."""
        if self._think_end_id is not None or self._has_ended or limit < 1 or self._matcher.is_stopped():
            return []
        return self._matcher.compute_ff_tokens()[:limit]

    def can_begin(self, vocab_size: int) -> bool:
        """Say whether the grammar's text can begin with a token that the request allows."""
        return bool(self._fitting(self._matcher, vocab_size).any())

    def _mask(self, row: NDArray[np.float64], matcher: LLMatcher, has_ended: bool) -> None:
        fitting = np.zeros(len(row), dtype=bool)
        if not has_ended and not matcher.is_stopped():
            fitting = self._fitting(matcher, len(row))
        if not fitting.any():
            fitting[list(self._eos_token_ids)] = True
        row[~fitting] = -np.inf
        if np.isneginf(row).all():  # other options banned all that fits: the grammar comes first
            row[fitting] = 0

    def _fitting(self, matcher: LLMatcher, vocab_size: int) -> NDArray[np.bool_]:
        """Return which tokens the grammar and the request both allow next, [V]."""
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        fitting = np.unpackbits(bits, count=vocab_size, bitorder="little").astype(bool)
        if self._allowed_ids is None:
            return fitting
        both = np.zeros_like(fitting)
        both[self._allowed_ids] = fitting[self._allowed_ids]
        if not both.any():  # of one text the matcher names the usual tokens alone; others may spell it
            both[[token for token in self._allowed_ids if matcher.validate_tokens([token])]] = True
        return both


def _failure(matcher: LLMatcher) -> str | None:
    if not matcher.is_stopped():
        matcher.compute_bitmask()  # may be what fails, and so far have failed on a copy only
    if matcher.is_error():
        said = matcher.get_error().strip().partition("\n")[0]
        return f"{PARAM} cannot be followed any further, so the output is not finished: {said}"
    if not matcher.is_accepting():
        return f"{PARAM} cannot be followed any further: allowed_token_ids hold no token that fits"
    return None


class _TokenTable:
    """A tokenizer as llguidance wants it, with an empty entry for each row of the target that is no token."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self.eos_token_id = tokenizer.eos_token_ids[0] if tokenizer.eos_token_ids else 0
        self.bos_token_id = None
        num_entries = max(vocab_size, tokenizer.vocab_size)
        self.tokens = [tokenizer.token_bytes(token) for token in range(num_entries)]
        # What ends the sequence is no text, even where the tokenizer does not list it as special.
        self.special_token_ids = sorted(tokenizer.special_token_ids.union(tokenizer.eos_token_ids))
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)


def _backend(tokenizer: Tokenizer, vocab_size: int) -> LLTokenizer:
    from llguidance import LLTokenizer, TokenizerWrapper

    eos = list(tokenizer.eos_token_ids) or None
    return LLTokenizer(TokenizerWrapper(_TokenTable(tokenizer, vocab_size)), eos_token=eos)


def _require_llguidance() -> None:
    if importlib.util.find_spec("llguidance") is None:
        raise MissingDependencyError("llguidance", PARAM, extra="structured")
