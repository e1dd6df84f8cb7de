"""Steps that the host decides: for options that the device cannot apply. Same kernels, same logits, one wait.

Which options those are, and the reading of one such step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lean_laguna.engine.gpu_lanes import Lanes, mark, seconds_between
from lean_laguna.engine.gpu_layout import filters_on_device, has_filters
from lean_laguna.engine.gpu_programs import StepPrograms
from lean_laguna.engine.sequence import SequenceState
from lean_laguna.spec.noise import NoiseCache
from lean_laguna.spec.sampling import RowBlock, SampledRows, sample_rows


def samples_on_host(sequence: SequenceState) -> list[str]:
    """Name the options with which the next token is not the head kernel's; empty where it is."""
    request, params = sequence.sampling, sequence.sampling.params
    named = {
        "penalties": request.has_penalties,
        "allowed_token_ids": request.forbidden is not None,
        "logit_bias": bool(len(request.bias_ids)),
        "bad_words": bool(request.bad_word_ids),
        "min_tokens": request.num_output_tokens < params.min_tokens,
        "structured_outputs or thinking_token_budget": request.is_constrained,
    }
    if params.temperature > 0 and not filters_on_device(params):
        named |= {"top_k": params.top_k > 0, "top_p": params.top_p < 1, "min_p": params.min_p > 0}
    found = [name for name, is_on in named.items() if is_on]
    return found or (["options of the logits"] if request.changes_logits else [])


def needs_host(sequence: SequenceState) -> list[str]:
    """Name the options with which the host must see each step's logits; empty where it need not."""
    wants_logprobs = sequence.request.params.logprobs is not None
    return samples_on_host(sequence) + ["logprobs"] * wants_logprobs


@dataclass(frozen=True)
class Verified:
    """One verified block of each of some sequences.

    Attributes:
        drafts: Of each.
        sampled: The target's tokens, and logits on the host for log-probabilities.
        draft_s: Seconds that drafting took.
        num_cut: Of each, drafts that were made and not worth verifying.
    """

    drafts: list[list[int]]
    sampled: SampledRows
    draft_s: float
    num_cut: list[int]

    def logits_of(self, block: int) -> Tensor:
        """Return the logits of one sequence's rows, [R, V]."""
        start = sum(len(tokens) for tokens in self.sampled.token_ids[:block])
        return self.sampled.logits[start : start + len(self.sampled.token_ids[block])]


class HostSteps:
    """Drafts and verifies for sequences whose tokens the host chooses; owned by the engine."""

    def __init__(self, programs: StepPrograms, lanes: Lanes, noise: NoiseCache):
        self._programs, self._lanes, self._noise = programs, lanes, noise

    def verify(self, sequences: Sequence[SequenceState], num_drafts: Sequence[int]) -> Verified:
        """Run one block of each sequence, all in one launch.

        Args:
            sequences: At most as many rows in all as a launch takes; their pages are there.
            num_drafts: Of each, at most what it can still say before its last token.
        """
        programs, lanes = self._programs, self._lanes
        mask_token = programs.drafter.mask_token if programs.drafter is not None else 0
        lane = lanes.make(sequences, num_drafts, mask_token)
        lanes.load(lane)
        cols = programs.columns(len(sequences) + sum(num_drafts))
        filtered = has_filters(sequences)
        before = mark(programs.device)
        if any(num_drafts):
            programs.run("propose", cols, filtered=filtered)
        drafted = mark(programs.device)
        programs.run("rows", cols, filtered=filtered)
        said = lanes.read_later()
        lanes.wait(mark(programs.device))
        lanes.drop(lane)
        fields = said.arrays
        drafts, tokens = [], []
        for entry in range(len(sequences)):
            start, count = int(fields["row_start"][entry]), int(fields["row_count"][entry])
            drafts.append([int(t) for t in fields["input_ids"][start + 1 : start + count]])
            tokens.append([int(t) for t in fields["sampled"][start : start + count]])
        logits = programs.logits_of(cols)[: int(fields["num_rows"][0])].cpu()
        lanes.give_back(said)
        sampled = SampledRows(tuple(self._choose(sequences, drafts, tokens, logits)), logits)
        num_cut = fields["cut"][: len(sequences)].tolist()
        return Verified(drafts, sampled, seconds_between(before, drafted), num_cut)

    def first_token(self, sequence: SequenceState, token: int, logits: Tensor) -> SampledRows:
        """Return the token after a prompt.

        Args:
            sequence: Whose prompt.
            token: The head kernel's choice.
            logits: [1, V] on the device.
        """
        if not needs_host(sequence):
            return SampledRows(([token],), logits)
        rows = logits.cpu()
        return SampledRows(tuple(self._choose([sequence], [[]], [[token]], rows)), rows)

    def _choose(
        self,
        sequences: Sequence[SequenceState],
        drafts: Sequence[Sequence[int]],
        tokens: Sequence[list[int]],
        logits: Tensor,
    ) -> list[list[int]]:
        """Take the kernel's tokens, or sample where options change them."""
        chosen = list(tokens)
        own = [i for i, sequence in enumerate(sequences) if samples_on_host(sequence)]
        if own:
            starts = [sum(len(row) for row in tokens[:i]) for i in own]
            rows = torch.cat([logits[at : at + len(tokens[i])] for i, at in zip(own, starts, strict=True)])
            blocks = [RowBlock(sequences[i].sampling, drafts[i]) for i in own]
            for i, found in zip(own, sample_rows(rows, blocks, self._noise).token_ids, strict=True):
                chosen[i] = found
        return chosen
