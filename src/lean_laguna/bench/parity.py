"""Whether two sides say the same, prompt by prompt; and if not, whether that is a near-tie or a fault.

Always with a control: the baseline against itself. A baseline that does not repeat itself would otherwise put
the blame on speculation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from lean_laguna.backends.base import Backend, GenerationResult
from lean_laguna.bench.rounds import Plan, RoundProgress
from lean_laguna.core.errors import RequestError
from lean_laguna.core.types import MAX_LOGPROBS, SamplingParams
from lean_laguna.spec.noise import gumbel_noise_at

Kind = Literal["identical", "near-tie", "mismatch"]
KINDS: tuple[Kind, ...] = ("identical", "near-tie", "mismatch")
# Two bfloat16 logits of size 8 to 16 are 2**-4 apart or equal, so rounding alone can turn a smaller lead
# round.
NEAR_TIE_MARGIN = 2**-4
CONTROL = "baseline again"


@dataclass(frozen=True)
class Verdict:
    """How one output compares with the baseline's.

    Attributes:
        prompt_id: The prompt.
        side: What was compared with the baseline.
        kind: ``identical``; ``near-tie``: the first different token had almost the same score; ``mismatch``.
        num_tokens: Length of the baseline's output.
        position: Index in the output of the first difference; None where identical.
        expected: The baseline's token there, as text; None where its output had ended.
        found: The other side's token, likewise.
        margin: Lead of the expected token over the found one in the score that decides (log-probability,
            divided by the temperature and with the request's noise added where sampling); None where not
            known.
        reason: What differs, in words; empty where identical.
    """

    prompt_id: str
    side: str
    kind: Kind
    num_tokens: int
    position: int | None = None
    expected: str | None = None
    found: str | None = None
    margin: float | None = None
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that say something, ready for JSON."""
        return {name: value for name, value in asdict(self).items() if value is not None and value != ""}


def worst_kind(verdicts: Sequence[Verdict]) -> Kind:
    """Return the gravest kind among the verdicts; ``identical`` for none."""
    return KINDS[max((KINDS.index(v.kind) for v in verdicts), default=0)]


def count_kinds(verdicts: Sequence[Verdict]) -> dict[str, int]:
    """Return how many verdicts are of each kind."""
    return {kind: sum(v.kind == kind for v in verdicts) for kind in KINDS}


def first_difference(expected: Sequence[int], found: Sequence[int]) -> int | None:
    """Return the first index where two token lists differ, the shorter one's end included; None if equal."""
    for index, (a, b) in enumerate(zip(expected, found, strict=False)):
        if a != b:
            return index
    return None if len(expected) == len(found) else min(len(expected), len(found))


class Comparer:
    """Compares outputs with a baseline backend's, and asks that backend for the scores where they part."""

    def __init__(self, baseline: Backend, plan: Plan):
        self._baseline = baseline
        self._plan = plan

    def compare(self, index: int, expected: GenerationResult, found: GenerationResult, side: str) -> Verdict:
        """Return the verdict on one output of prompt ``index``."""
        base = Verdict(self._plan.prompts.prompts[index].id, side, "identical", expected.num_tokens)
        if any(r.num_tokens and not r.token_ids for r in (expected, found)):
            return _compare_texts(base, expected, found)
        position = first_difference(expected.token_ids, found.token_ids)
        if position is None:
            for name in ("text", "finish_reason"):
                if getattr(expected, name) != getattr(found, name):
                    what = f"{name}: {getattr(expected, name)!r:.40} became {getattr(found, name)!r:.40}"
                    return dataclasses.replace(base, kind="mismatch", reason=f"same tokens, but {what}")
            return base
        ids = [r.token_ids[position] if position < len(r.token_ids) else None for r in (expected, found)]
        scores = self._scores(index, expected, position)
        texts = ["end of output" if i is None else scores[i][1] if i in scores else f"token {i}" for i in ids]
        margin = None
        if ids[0] in scores and ids[1] in scores:
            margin = scores[ids[0]][0] - scores[ids[1]][0]
        is_tie = margin is not None and abs(margin) < NEAR_TIE_MARGIN
        return dataclasses.replace(
            base,
            kind="near-tie" if is_tie else "mismatch",
            position=position,
            expected=texts[0],
            found=texts[1],
            margin=margin,
            reason=f"token {position}: {texts[0]!r} became {texts[1]!r}",
        )

    def _scores(
        self, index: int, expected: GenerationResult, position: int
    ) -> dict[int | None, tuple[float, str]]:
        """Return score and text of the likeliest tokens at ``position``, by id, as the baseline sees them."""
        params = self._plan.params_of(index)
        params = dataclasses.replace(
            params,
            logprobs=MAX_LOGPROBS,
            max_tokens=position + 1,
            min_tokens=min(params.min_tokens, position + 1),
        )
        try:
            again = self._baseline.generate([self._plan.prompts.prompts[index].prompt], params)[0]
        except RequestError:  # a server that gives no such scores: no margin is known
            return {}
        if (
            not again.logprobs
            or len(again.logprobs) <= position
            or first_difference(expected.token_ids[:position], again.token_ids[:position]) is not None
        ):
            return {}  # the baseline took another way this time: its scores are about another text
        entries = again.logprobs[position]
        noise = _noise_at(params, expected.num_prompt_tokens + position, list(entries))
        scale = params.temperature or 1.0
        return {
            token: (entry.logprob / scale + noise[token], entry.decoded_token or f"token {token}")
            for token, entry in entries.items()
        }


def _compare_texts(base: Verdict, expected: GenerationResult, found: GenerationResult) -> Verdict:
    """Return the verdict where a side names no token ids: texts are compared, and no margin is known."""
    for name in ("text", "finish_reason", "num_tokens"):
        a, b = getattr(expected, name), getattr(found, name)
        if a == b:
            continue
        if name != "text":
            reason = f"same text, but {name}: {a!r} became {b!r}"
            return dataclasses.replace(base, kind="mismatch", reason=reason)
        place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        texts = [text[place : place + 20] or "end of output" for text in (a, b)]
        reason = f"character {place}: {texts[0]!r} became {texts[1]!r}"
        return dataclasses.replace(base, kind="mismatch", expected=texts[0], found=texts[1], reason=reason)
    return base


def _noise_at(params: SamplingParams, position: int, tokens: Sequence[int]) -> dict[int, float]:
    if params.is_greedy or params.seed is None:
        return dict.fromkeys(tokens, 0.0)
    ids = np.array(tokens, dtype=np.int64)
    values = gumbel_noise_at([params.seed] * len(tokens), [position] * len(tokens), ids)
    return dict(zip(tokens, values.tolist(), strict=True))


@dataclass(frozen=True)
class ParityReport:
    """Verdicts of every side on every prompt, the control first.

    Attributes:
        verdicts: By side, in the order of the prompts.
        num_tokens: Baseline tokens compared.
    """

    verdicts: Mapping[str, list[Verdict]]
    num_tokens: int

    @property
    def num_mismatches(self) -> int:
        """Verdicts ``mismatch`` of all sides, the control included."""
        return sum(v.kind == "mismatch" for side in self.verdicts.values() for v in side)

    @property
    def num_near_ties(self) -> int:
        """Verdicts ``near-tie`` of all sides, the control included."""
        return sum(v.kind == "near-tie" for side in self.verdicts.values() for v in side)

    def to_dict(self) -> dict[str, Any]:
        """Return the part of the result file that was measured, ready for JSON."""
        return {
            "parity": {
                "num_mismatches": self.num_mismatches,
                "num_near_ties": self.num_near_ties,
                "num_tokens": self.num_tokens,
                "differences": [
                    v.to_dict() for side in self.verdicts.values() for v in side if v.kind != "identical"
                ],
            },
            "verdicts": {name: [v.to_dict() for v in side] for name, side in self.verdicts.items()},
        }


def run_parity(
    baseline: Backend, sides: Mapping[str, Backend], plan: Plan, on_progress: RoundProgress | None = None
) -> ParityReport:
    """Run every prompt on the baseline twice and on every side once, and compare with the first run.

    Args:
        baseline: The side that is right by definition.
        sides: What to compare with it, by name.
        plan: Prompts and parameters; repeats and warm-up do not apply.
        on_progress: Told before each generation.

    Raises:
        RequestError: A backend cannot serve a prompt.
    """
    comparer = Comparer(baseline, plan)
    prompts = plan.prompts.prompts
    runs = {CONTROL: baseline, **sides}
    verdicts: dict[str, list[Verdict]] = {name: [] for name in runs}
    total, done, num_tokens = len(prompts) * (1 + len(runs)), 0, 0
    for index, prompt in enumerate(prompts):
        expected: GenerationResult | None = None
        for name, backend in {"baseline": baseline, **runs}.items():
            if on_progress is not None:
                on_progress(done, total, f"{prompt.id}, {name}")
            done += 1
            result = backend.generate([prompt.prompt], plan.params_of(index))[0]
            if expected is None:
                expected = result
                num_tokens += result.num_tokens
            else:
                verdicts[name].append(comparer.compare(index, expected, result, name))
    if on_progress is not None:
        on_progress(total, total, "done")
    return ParityReport(verdicts, num_tokens)
