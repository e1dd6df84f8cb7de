"""What a request is and what comes back, in the shape vLLM's users know.

Source: the field names and defaults of vllm.SamplingParams, vllm.RequestOutput (vLLM 0.25).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from lean_laguna.core.errors import RequestError, reject_unknown
from lean_laguna.core.json_fields import is_finite_number
from lean_laguna.core.structured_outputs import StructuredOutputs

FinishReason = Literal["stop", "length", "abort", "error"]
MAX_LOGPROBS = 20
MAX_SEED = 2**64 - 1
MAX_COMPLETIONS = 16384


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen; the same with and without a drafter.

    Attributes:
        n: Completions per prompt, 1 to 16384. Completion i > 0 draws from its own random stream.
        temperature: At least 0; 0 is greedy, a branch of its own and not a small temperature.
        top_p: In (0, 1]; keep the smallest set of tokens whose probability reaches it.
        top_k: Keep the k most probable tokens; 0 or -1 keeps all.
        min_p: In [0, 1]; drop tokens below this share of the most probable one.
        repetition_penalty: Above 0; divides (or, below zero, multiplies) logits of tokens seen so far.
        presence_penalty: In [-2, 2]; subtracted once from logits of tokens seen in the output.
        frequency_penalty: In [-2, 2]; subtracted per occurrence in the output.
        logit_bias: Token id to a bias in [-100, 100] added to its logit.
        allowed_token_ids: The only tokens that may be chosen; None for any.
        min_tokens: No end-of-sequence or stop token before so many output tokens.
        max_tokens: At most so many output tokens; None means up to the context limit.
        stop: Texts that end the output; cut from it unless ``include_stop_str_in_output``.
        stop_token_ids: Token ids that end the output.
        ignore_eos: Keep going past the checkpoint's end-of-sequence tokens.
        seed: Key of the random stream, 0 to 2**64 - 1; None draws one and reports it.
        logprobs: Report the log-probabilities of so many top tokens beside the chosen one, 0 to 20.
        prompt_logprobs: The same for the prompt's tokens.
        bad_words: Texts that must not appear in the output.
        include_stop_str_in_output: Keep the stop text at the end of the output.
        skip_special_tokens: Leave special tokens out of the text.
        thinking_token_budget: At most so many tokens of thinking, then its closing tag; None or -1 for any.
        structured_outputs: What the text must be, once the thinking is over; a mapping is read as one.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    min_tokens: int = 0
    max_tokens: int | None = 16
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    bad_words: Sequence[str] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    thinking_token_budget: int | None = None
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        """Normalise ``stop`` and refuse values out of range.

        Raises:
            RequestError: Names the field, the value and the accepted range.
        """
        self._normalise_lists()
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if self.thinking_token_budget == -1:
            object.__setattr__(self, "thinking_token_budget", None)
        self._read_structured_outputs()
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        ):
            value = getattr(self, name)
            if not is_finite_number(value):
                raise RequestError(f"{name} must be a finite number, found {value!r}", param=name)
        optional = ("max_tokens", "seed", "logprobs", "prompt_logprobs", "thinking_token_budget")
        for name in ("n", "top_k", "min_tokens", *optional):
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise RequestError(f"{name} must be a whole number, found {value!r}", param=name)
        self._check("n", 1 <= self.n <= MAX_COMPLETIONS, f"in 1 .. {MAX_COMPLETIONS}")
        self._check("temperature", self.temperature >= 0, "at least 0")
        self._check("top_p", 0 < self.top_p <= 1, "in (0, 1]")
        self._check("top_k", self.top_k >= 0, "0 or -1 (all tokens) or a positive count")
        self._check("min_p", 0 <= self.min_p <= 1, "in [0, 1]")
        self._check("repetition_penalty", self.repetition_penalty > 0, "above 0")
        self._check("presence_penalty", -2 <= self.presence_penalty <= 2, "in [-2, 2]")
        self._check("frequency_penalty", -2 <= self.frequency_penalty <= 2, "in [-2, 2]")
        self._check("min_tokens", self.min_tokens >= 0, "at least 0")
        if self.max_tokens is not None:
            self._check("max_tokens", self.max_tokens >= 1, "at least 1")
            self._check(
                "min_tokens", self.min_tokens <= self.max_tokens, f"at most max_tokens ({self.max_tokens})"
            )
        if self.thinking_token_budget is not None:
            self._check("thinking_token_budget", self.thinking_token_budget >= 0, "at least 0, or -1 for any")
        if self.seed is not None:
            self._check("seed", 0 <= self.seed <= MAX_SEED, "in 0 .. 2**64 - 1")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                self._check(name, 0 <= value <= MAX_LOGPROBS, f"in 0 .. {MAX_LOGPROBS}")
        for name in ("stop", "bad_words"):
            if any(not isinstance(text, str) or not text for text in getattr(self, name)):
                raise RequestError(
                    f"{name} must hold non-empty texts, found {getattr(self, name)!r}", param=name
                )
        self._check_token_ids()

    def _normalise_lists(self) -> None:
        for name in ("stop", "bad_words", "stop_token_ids", "allowed_token_ids"):
            given = getattr(self, name)
            if given is None:
                if name == "allowed_token_ids":
                    continue
                given = ()
            elif isinstance(given, str) and not name.endswith("token_ids"):
                given = (given,)
            elif isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
                raise RequestError(f"{name} must be a list, found {given!r:.200}", param=name)
            object.__setattr__(self, name, tuple(given))

    def _read_structured_outputs(self) -> None:
        given = self.structured_outputs
        if isinstance(given, Mapping):
            object.__setattr__(self, "structured_outputs", StructuredOutputs.from_dict(given))
        elif not isinstance(given, StructuredOutputs | None):
            raise RequestError(
                f"structured_outputs must be an object, found {given!r:.200}", param="structured_outputs"
            )

    def _check_token_ids(self) -> None:
        for name in ("stop_token_ids", "allowed_token_ids"):
            ids = getattr(self, name) or ()
            if any(type(token) is not int or token < 0 for token in ids):
                raise RequestError(f"{name} must hold token ids, found {list(ids)!r:.200}", param=name)
        if self.allowed_token_ids == ():
            raise RequestError(
                "allowed_token_ids must hold at least one token id, found none; leave it out to allow all",
                param="allowed_token_ids",
            )
        if not isinstance(self.logit_bias, Mapping | None):
            raise RequestError(
                f"logit_bias must map token ids to values in [-100, 100], found {self.logit_bias!r:.200}",
                param="logit_bias",
            )
        for token, bias in (self.logit_bias or {}).items():
            if type(token) is not int or not is_finite_number(bias) or not -100 <= bias <= 100:
                raise RequestError(
                    f"logit_bias must map token ids to values in [-100, 100], found {{{token!r}: {bias!r}}}",
                    param="logit_bias",
                )

    def _check(self, name: str, holds: bool, accepted: str) -> None:
        if not holds:
            raise RequestError(f"{name} must be {accepted}, found {getattr(self, name)!r}", param=name)

    @property
    def is_greedy(self) -> bool:
        """True where the target's argmax decides."""
        return self.temperature == 0

    @classmethod
    def from_dict(cls, given: Mapping[str, Any], where: str = "sampling parameters") -> SamplingParams:
        """Build from a mapping, strict about unknown keys.

        Raises:
            ConfigError: On an unknown key.
            RequestError: On a value out of range.
        """
        reject_unknown(given, (f.name for f in fields(cls)), where)
        return cls(**given)


@dataclass(frozen=True)
class Logprob:
    """Log-probability of one token under the distribution it was drawn from, before filters.

    Attributes:
        logprob: Natural logarithm of the probability; -inf possible.
        rank: 1 for the most probable token.
        decoded_token: The token as text.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True)
class SpeculationStats:
    """Counts of drafting and verification, with vLLM's definitions: the bonus token is in none of them.

    Attributes:
        num_drafts: Verification steps that carried at least one draft token.
        num_draft_tokens: Draft tokens sent to verification.
        num_accepted_tokens: Draft tokens accepted.
        num_accepted_tokens_per_pos: Entry i counts steps that accepted draft i (0-based) and all before.
        num_steps: Decode steps of the target, with or without drafts.
        num_cut_draft_tokens: Draft tokens made and not sent to verification, for want of confidence.
        per_step: Of one completion, per step with drafts and in order, how many were sent and accepted; sums
            over several have none.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: tuple[int, ...] = ()
    num_steps: int = 0
    num_cut_draft_tokens: int = 0
    per_step: tuple[tuple[int, int], ...] = ()

    @property
    def mean_acceptance_length(self) -> float | None:
        """1 + accepted / drafts, the bonus token counted; None where nothing was drafted."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted / drafted tokens, in [0, 1]; None where nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def draft_acceptance_rate_per_pos(self) -> tuple[float, ...]:
        """Unconditional acceptance of each position: accepted there / drafts."""
        return (
            tuple(count / self.num_drafts for count in self.num_accepted_tokens_per_pos)
            if self.num_drafts
            else ()
        )

    def __add__(self, other: SpeculationStats) -> SpeculationStats:
        """Add counts, position by position."""
        mine, theirs = self.num_accepted_tokens_per_pos, other.num_accepted_tokens_per_pos
        width = max(len(mine), len(theirs))
        per_pos = tuple(
            (mine[i] if i < len(mine) else 0) + (theirs[i] if i < len(theirs) else 0) for i in range(width)
        )
        return SpeculationStats(
            self.num_drafts + other.num_drafts,
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_accepted_tokens + other.num_accepted_tokens,
            per_pos,
            self.num_steps + other.num_steps,
            self.num_cut_draft_tokens + other.num_cut_draft_tokens,
        )


@dataclass(frozen=True)
class CompletionOutput:
    """One completion of a prompt; text, ids and log-probabilities always agree.

    Attributes:
        index: Which of the request's ``n`` completions.
        text: Decoded text; never holds a broken character.
        token_ids: The emitted tokens, stop token included.
        cumulative_logprob: Sum over the emitted tokens, where log-probabilities were asked for.
        logprobs: Per emitted token, candidates by token id.
        finish_reason: ``stop``, ``length``, ``abort``, ``error`` (its ``structured_outputs`` could not be
            followed to an end: ``stop_reason`` says why) or None while running.
        stop_reason: The stop text or stop token id that ended it; None for end-of-sequence.
        is_draft_token: Per emitted token, True where it came from an accepted draft.
        seed: Key of the random stream used.
        speculation: Counts of this completion; None where no drafter ran.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    cumulative_logprob: float | None = None
    logprobs: tuple[Mapping[int, Logprob], ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    is_draft_token: tuple[bool, ...] = ()
    seed: int | None = None
    speculation: SpeculationStats | None = None


@dataclass(frozen=True)
class RequestTimes:
    """Clock readings of a request, in seconds of ``time.perf_counter``; None where not reached."""

    arrival_s: float
    first_token_s: float | None = None
    last_token_s: float | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A request's state: the whole of it so far, not only what is new.

    Attributes:
        request_id: As given or made at submission.
        prompt: The prompt's text, where it was given as text.
        prompt_token_ids: The prompt's tokens.
        outputs: One entry per completion.
        finished: True once every completion has a finish reason.
        prompt_logprobs: Per prompt token (the first is None), where asked for.
        num_cached_tokens: Prompt tokens taken from the prefix cache.
        times: Clock readings.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    prompt_logprobs: tuple[Mapping[int, Logprob] | None, ...] | None = None
    num_cached_tokens: int = 0
    times: RequestTimes = field(default_factory=lambda: RequestTimes(0.0))
