"""The DSpark drafter as a proposer: one pass for the block, then a walk from draft to draft.

Each draft is drawn with the noise that the verifier will draw with, from the block's logits and the bias by
the token before it. Where the costs of a step are known and the drafter says how confident it is, drafts that
are not worth verifying are not sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lean_laguna.models.dflash import DFlashDrafter
from lean_laguna.models.dspark import DSparkDrafter
from lean_laguna.models.kv_cache import KVCache
from lean_laguna.spec.confidence import Calibration
from lean_laguna.spec.draft_schedule import DraftSchedule, StepCosts, StepWorth
from lean_laguna.spec.markov_rows import Float32Array, MarkovRows
from lean_laguna.spec.noise import NoiseCache
from lean_laguna.spec.proposer import DFlashProposer, DraftRequest, TargetEnds
from lean_laguna.spec.sampling import sample_next_drafts


class DSparkProposer(DFlashProposer):
    """Proposes with a DSpark drafter.

    Attributes:
        schedule: Shared with who times steps; None where the drafter has no confidence head.
    """

    drafter: DSparkDrafter

    def __init__(self, drafter: DSparkDrafter, target: TargetEnds):
        """Pair a drafter with the target whose embedding and lm_head it borrows."""
        super().__init__(drafter, target)
        self.schedule = DraftSchedule() if drafter.confidence_weight is not None else None
        self._rows = MarkovRows(drafter)
        heads, count = drafter.heads, drafter.config.max_draft_tokens
        self._greedy = Calibration(heads.greedy_temperatures, heads.greedy_biases).padded(count)
        self._sampled = Calibration(heads.sampled_temperatures, heads.sampled_biases).padded(count)

    def propose(
        self, requests: Sequence[DraftRequest], kv_cache: KVCache, noise: NoiseCache
    ) -> list[list[int]]:
        """Draft for each request, and cut what is not worth verifying; see `Proposer.propose`."""
        lengths = [self._length(request) for request in requests]
        drafted = [(request, n) for request, n in zip(requests, lengths, strict=True) if n]
        costs = self.schedule.costs if self.schedule is not None else None
        found: list[list[int]] = []
        survival: list[list[float]] = []
        if drafted:
            batch = self._block_batch(drafted, kv_cache.kv_block_size)
            with torch.no_grad():
                hidden = self.drafter.propose(batch, kv_cache, self.target.embed)[self._slots(batch)]
                logits = self.drafter.compute_logits(hidden, self.target.compute_logits)
                found, survival = self._walk(drafted, hidden, logits, noise, costs)
        every = iter(zip(found, survival, strict=True))
        walked = [next(every) if n else ([], []) for n in lengths]
        if self.schedule is None:
            return [tokens for tokens, _ in walked]
        self.schedule.survival = [chances for _, chances in walked]
        kept = costs.best_length([chances for _, chances in walked]) if costs is not None else None
        self.schedule.cut = [_chances_beyond(chances, kept) for _, chances in walked]
        self.schedule.num_cut_draft_tokens += sum(len(cut) for cut in self.schedule.cut)
        return [tokens[:kept] for tokens, _ in walked]

    def _walk(
        self,
        drafted: Sequence[tuple[DraftRequest, int]],
        hidden: Tensor,
        logits: Tensor,
        noise: NoiseCache,
        costs: StepCosts | None,
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Draw drafts one after the other, for all requests at once; stop where more cannot pay.

        Args:
            drafted: Requests and their draft lengths, at least 1 each.
            hidden: [sum of lengths, D], request by request.
            logits: [sum of lengths, V] without the bias.
            noise: Shared with the verifier.
            costs: Of the step, or None to draw all.

        Returns:
            Per request, its drafts and, where wanted, their chances of survival.
        """
        starts = [0]
        for _, length in drafted:
            starts.append(starts[-1] + length)
        wants_chances = costs is not None or (self.schedule is not None and self.schedule.wants_chances)
        heads = _Heads(self.drafter, self._rows, hidden, logits, wants_guesses=wants_chances)
        tokens: list[list[int]] = [[] for _ in drafted]
        survival: list[list[float]] = [[] for _ in drafted]
        worth = None if costs is None else StepWorth(costs)
        meanings = [
            self._greedy if one.request.params.temperature == 0 else self._sampled for one, _ in drafted
        ]
        for k in range(max(length for _, length in drafted)):
            going_on = [i for i, (_, length) in enumerate(drafted) if length > k]
            requests = [drafted[i][0].request for i in going_on]
            before = [
                tokens[i][-1] if k else request.output_token_ids[-1]
                for i, request in zip(going_on, requests, strict=True)
            ]
            at = [starts[i] + k for i in going_on]
            biased = heads.biased(at, before)
            following = sample_next_drafts(biased, requests, [tokens[i] for i in going_on], noise)
            for i, token in zip(going_on, following, strict=True):
                tokens[i].append(token)
            if not wants_chances:
                continue
            reaching = 0.0
            for i, guess in zip(going_on, heads.guesses(at, before), strict=True):
                (temperatures, biases), chances = meanings[i], survival[i]
                guess = guess / temperatures[k] + biases[k]
                reached = (chances[-1] if k else 1.0) * 0.5 * (1.0 + math.tanh(0.5 * guess))
                chances.append(reached)
                reaching += reached
            if worth is not None:
                worth.add(reaching)
                if not worth.may_grow:
                    break
        return tokens, survival


class _Heads:
    """The two heads over one block; on a CPU by what is kept of each token."""

    def __init__(
        self, drafter: DSparkDrafter, rows: MarkovRows, hidden: Tensor, logits: Tensor, *, wants_guesses: bool
    ):
        self._drafter, self._rows, self._hidden, self._logits = drafter, rows, hidden, logits
        self._array: Float32Array | None = logits.numpy() if logits.is_cpu else None
        if self._array is not None:
            rows.refresh()
            self._guesses = rows.guesses(hidden) if wants_guesses else []

    def biased(self, slots: list[int], before: list[int]) -> Tensor:
        """Return the logits of some slots with the bias by the tokens before them, [R, V]."""
        if self._array is not None:
            biases = self._rows.biases(before)
            return torch.from_numpy(
                np.stack([self._array[at] + bias for at, bias in zip(slots, biases, strict=True)])
            )
        markov = self._drafter.markov_rows(torch.tensor(before, device=self._logits.device))
        return self._drafter.add_bias(self._logits[slots], markov)

    def guesses(self, slots: list[int], before: list[int]) -> list[float]:
        """Return the confidence logits of some slots."""
        if self._array is not None:
            after = zip(slots, before, strict=True)
            return [self._guesses[at] + self._rows.guess_after(token) for at, token in after]
        markov = self._drafter.markov_rows(torch.tensor(before, device=self._logits.device))
        values: list[float] = self._drafter.confidence_logits(self._hidden[slots], markov).tolist()
        return values


def make_proposer(drafter: DFlashDrafter, target: TargetEnds) -> DFlashProposer:
    """Return the proposer for a drafter of either kind."""
    if isinstance(drafter, DSparkDrafter):
        return DSparkProposer(drafter, target)
    return DFlashProposer(drafter, target)


def _chances_beyond(survival: Sequence[float], kept: int | None) -> tuple[float, ...]:
    """Return the chance of each draft from ``kept`` on, given that those before it are accepted."""
    if kept is None:
        return ()
    before = [1.0, *survival]
    return tuple(after / max(1e-9, before[k]) for k, after in enumerate(survival) if k >= kept)
