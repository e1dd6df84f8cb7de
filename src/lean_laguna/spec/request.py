"""What sampling knows of one completion: its options, its random stream, and what it has committed so far.

Everything that a logits option needs from the past is kept here and updated on commit, so that a step costs
nothing for options that are off and nothing that grows with the length for those that are on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from lean_laguna.core.errors import RequestError
from lean_laguna.core.types import SamplingParams
from lean_laguna.spec.constraint import Constraint

Int64Array = NDArray[np.int64]


def bad_word_sequences(
    words: Sequence[str], encode: Callable[[str], Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """Tokenise bad words as at the start of a text and, where that gives another token, after a space.

    Args:
        words: ``SamplingParams.bad_words``.
        encode: Text to token ids, without special tokens.

    Returns:
        Token sequences whose last token is banned where the others precede it.

    Source: vLLM ``SamplingParams.update_from_tokenizer``.
    """
    sequences: list[tuple[int, ...]] = []
    for word in words:
        plain = tuple(encode(word.lstrip()))
        spaced = tuple(encode(" " + word.lstrip()))
        if plain:
            sequences.append(plain)
        if spaced and len(spaced) == len(plain) and spaced[0] != plain[0]:
            sequences.append(spaced)
    return tuple(dict.fromkeys(sequences))


class TokenCounts:
    """How often each token was seen, for the penalties; holds seen tokens only, in order of appearance.

    Invariant: entry i describes token ``ids[i]``; prompt-only tokens have an output count of 0.
    """

    def __init__(self, prompt_token_ids: Sequence[int]):
        """Start from a prompt; give an empty one where only the output is to be counted."""
        seen = dict.fromkeys(prompt_token_ids)
        self._slots = {token: slot for slot, token in enumerate(seen)}
        self._ids = np.fromiter(seen, dtype=np.int64, count=len(seen))
        self._counts = np.zeros(len(seen), dtype=np.int64)
        self._num_prompt = len(seen)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Count output tokens."""
        new = [token for token in dict.fromkeys(token_ids) if token not in self._slots]
        if len(self._slots) + len(new) > len(self._ids):
            room = max(64, len(self._ids), len(new))
            self._ids = np.concatenate([self._ids, np.zeros(room, dtype=np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(room, dtype=np.int64)])
        for token in new:
            self._ids[len(self._slots)] = token
            self._slots[token] = len(self._slots)
        for token in token_ids:
            self._counts[self._slots[token]] += 1

    def rows(
        self, draft_token_ids: Sequence[int], first_row: int, num_rows: int
    ) -> tuple[Int64Array, NDArray[np.bool_], Int64Array]:
        """Return the counts as rows ``first_row`` and on see them: row r with the drafts before index r.

        Args:
            draft_token_ids: Drafts that follow the committed tokens; negative ones count for nothing.
            first_row: Index of the first row wanted.
            num_rows: How many rows.

        Returns:
            Token ids [U], whether each is in the prompt [U], and output counts [num_rows, U].
        """
        extra: dict[int, int] = {}
        for token in draft_token_ids:
            if token >= 0 and token not in self._slots:
                extra.setdefault(token, len(self._slots) + len(extra))
        num_known = len(self._slots)
        ids = np.empty(num_known + len(extra), dtype=np.int64)
        ids[:num_known] = self._ids[:num_known]
        ids[num_known:] = list(extra)
        counts = np.zeros((num_rows, len(ids)), dtype=np.int64)
        counts[:, :num_known] = self._counts[:num_known]
        for index, token in enumerate(draft_token_ids):
            if token >= 0:
                slot = extra[token] if token in extra else self._slots[token]
                counts[max(0, index + 1 - first_row) :, slot] += 1
        return ids, np.arange(len(ids)) < self._num_prompt, counts


class SamplingRequest:
    """One completion as the sampler sees it; owned by the engine, which commits every emitted token.

    Attributes:
        params: The options.
        seed: Key of the random stream, in [0, 2**64), from `noise.derive_seed`.
        vocab_size: V of the target.
        prompt_token_ids: The prompt.
        output_token_ids: Committed output tokens, in order; read only for others.
        eos_token_ids: The checkpoint's end-of-sequence tokens.
        bad_word_ids: Token sequences from `bad_word_sequences`.
        stop_ids: End-of-sequence and stop tokens below V, masked until ``min_tokens`` are out.
        forbidden: [V] bool, tokens not among the allowed ones; None where all are.
        bias_ids: Tokens with a logit bias.
        bias_values: [len(bias_ids)] float64.
        counts: Seen tokens, or None where no penalty is on.
        constraints: Further rules for the next token, in the order in which they apply: the last word counts.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        *,
        seed: int,
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
        bad_word_ids: Sequence[Sequence[int]] = (),
        constraints: Sequence[Constraint] = (),
    ):
        """Prepare the options.

        Args:
            params: The options; its ``seed`` and ``n`` are not read.
            prompt_token_ids: The whole prompt.
            seed: Key of this completion's random stream.
            vocab_size: V of the target.
            eos_token_ids: End-of-sequence tokens.
            bad_word_ids: Token sequences for ``params.bad_words``.
            constraints: This completion's own, with nothing committed.

        Raises:
            RequestError: A biased, banned or allowed token is not in the vocabulary.
        """
        self.params = params
        self.seed = seed
        self.vocab_size = vocab_size
        self.prompt_token_ids = prompt_token_ids
        self.output_token_ids: list[int] = []
        self.eos_token_ids = frozenset(eos_token_ids)
        self.bad_word_ids = tuple(tuple(word) for word in bad_word_ids)
        bias = params.logit_bias or {}
        check_vocabulary(bias, vocab_size, "logit_bias")
        check_vocabulary([token for word in self.bad_word_ids for token in word], vocab_size, "bad_words")
        self.forbidden: NDArray[np.bool_] | None = None
        if params.allowed_token_ids is not None:
            check_vocabulary(params.allowed_token_ids, vocab_size, "allowed_token_ids")
            self.forbidden = np.ones(vocab_size, dtype=np.bool_)
            self.forbidden[list(params.allowed_token_ids)] = False
        self.bias_ids = np.array(sorted(bias), dtype=np.int64)
        self.bias_values = np.array([bias[token] for token in sorted(bias)], dtype=np.float64)
        stops = self.eos_token_ids.union(params.stop_token_ids)
        self.stop_ids = sorted(token for token in stops if 0 <= token < vocab_size)
        self.has_penalties = bool(
            params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
        )
        prompt_matters = params.repetition_penalty != 1
        self.counts = TokenCounts(prompt_token_ids if prompt_matters else ()) if self.has_penalties else None
        self.constraints = tuple(constraints)
        self._bans_by_last: dict[int, list[tuple[int, ...]]] = {}
        for word in self.bad_word_ids:
            if len(word) > 1:
                self._bans_by_last.setdefault(word[-2], []).append(word)
        self._always_banned = [word[0] for word in self.bad_word_ids if len(word) == 1]
        self._longest_ban = max((len(word) for word in self.bad_word_ids), default=1) - 1

    @property
    def num_output_tokens(self) -> int:
        """Committed output tokens."""
        return len(self.output_token_ids)

    @property
    def next_position(self) -> int:
        """Absolute position of the next token; the anchor stands one before it."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def depends_on_prefix(self) -> bool:
        """True where logits options read which tokens came before, not only how many."""
        return self.has_penalties or bool(self._bans_by_last) or self.is_constrained

    @property
    def changes_logits(self) -> bool:
        """True where an option changes the next token's logits before temperature and filters."""
        return bool(
            self.has_penalties
            or self.forbidden is not None
            or len(self.bias_ids)
            or self.bad_word_ids
            or len(self.output_token_ids) < self.params.min_tokens
            or self.is_constrained
        )

    @property
    def is_constrained(self) -> bool:
        """True where a grammar or a thinking budget may restrict rows of the next block."""
        return any(constraint.is_active for constraint in self.constraints)

    @property
    def failure(self) -> str | None:
        """Why a constraint had to end the output before it was what it must be; None where none had to."""
        return next((c.failure for c in self.constraints if c.failure is not None), None)

    def forced_tokens(self, limit: int) -> list[int]:
        """Return tokens that a constraint foresees next, at most ``limit``; they are drafts like others."""
        for constraint in reversed(self.constraints):
            if tokens := constraint.forced_tokens(limit):
                return tokens
        return []

    def commit(self, token_ids: Sequence[int]) -> None:
        """Take emitted tokens, every one of them, in order."""
        self.output_token_ids.extend(token_ids)
        if self.counts is not None:
            self.counts.commit(token_ids)
        for constraint in self.constraints:
            constraint.commit(token_ids)

    def banned_ids(self, draft_token_ids: Sequence[int]) -> list[int]:
        """Return the tokens that must not follow the committed tokens and these drafts, maybe repeated.

        Bad words look at the output only, as in vLLM; min_tokens bans stop tokens even under ``ignore_eos``.
        """
        banned = list(self._always_banned)
        if len(self.output_token_ids) + len(draft_token_ids) < self.params.min_tokens:
            banned += self.stop_ids
        if self._bans_by_last:
            tail = tuple(draft_token_ids[-self._longest_ban :])
            if len(tail) < self._longest_ban:
                tail = (*self.output_token_ids[len(tail) - self._longest_ban :], *tail)
            for word in self._bans_by_last.get(tail[-1], ()) if tail else ():
                if tail[-len(word) + 1 :] == word[:-1]:
                    banned.append(word[-1])
        return banned


def check_vocabulary(token_ids: Iterable[int], vocab_size: int, param: str) -> None:
    """Refuse tokens that the target does not have.

    Raises:
        RequestError: For the first of them.
    """
    for token in token_ids:
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"{param}: token id {token} is not in the vocabulary (0 to {vocab_size - 1})", param=param
            )
