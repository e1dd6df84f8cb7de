"""Decoding a toy target with the functions of ``spec``: plainly, or with any drafter."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from lean_laguna.core.types import Logprob, SamplingParams, SpeculationStats
from lean_laguna.spec.acceptance import Ending, accept, cut_block
from lean_laguna.spec.constraint import Constraint
from lean_laguna.spec.noise import NoiseCache
from lean_laguna.spec.sampling import RowBlock, SamplingRequest, sample_drafts, sample_rows
from lean_laguna.spec.statistics import SpeculationCounter

EOS = 3
Drafter = Callable[[SamplingRequest, NoiseCache], Sequence[int]]


class ToyTarget:
    """Logits as a fixed function of the last two tokens and the length; coarse, so that ties are common."""

    def __init__(self, vocab_size: int, salt: int, spread: float = 2.0, step: float = 0.25):
        self.vocab_size, self.salt, self.spread, self.step = vocab_size, salt, spread, step

    def row(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits [V] float32 for the token after ``tokens``."""
        key = np.array([self.salt, len(tokens), *tokens[-2:]], dtype=np.int64)
        rng = np.random.default_rng(zlib.crc32(key.tobytes()))
        values = rng.standard_normal(self.vocab_size) * self.spread
        return (np.round(values / self.step) * self.step).astype(np.float32)

    def rows(self, tokens: Sequence[int], drafts: Sequence[int]) -> torch.Tensor:
        """Logits [G + 1, V] after ``tokens`` and each prefix of ``drafts``."""
        return torch.from_numpy(np.stack([self.row([*tokens, *drafts[:i]]) for i in range(len(drafts) + 1)]))


@dataclass
class Decoded:
    """What a completion came to."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    def outcome(self) -> tuple[object, ...]:
        """What must not depend on speculation."""
        return self.token_ids, self.logprobs, self.finish_reason, self.stop_reason


def new_request(
    target: ToyTarget,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    seed: int = 0,
    bad_word_ids: Sequence[Sequence[int]] = (),
    eos_token_ids: Sequence[int] = (EOS,),
    constraints: Sequence[Constraint] = (),
) -> SamplingRequest:
    """Make a request."""
    return SamplingRequest(
        params,
        prompt,
        seed=seed,
        vocab_size=target.vocab_size,
        eos_token_ids=eos_token_ids,
        bad_word_ids=bad_word_ids,
        constraints=constraints,
    )


def ending_of(request: SamplingRequest, context_limit: int = 10**9) -> Ending:
    """What ends a request."""
    params = request.params
    room = context_limit - len(request.prompt_token_ids)
    return Ending(
        max_tokens=min(params.max_tokens or room, room),
        min_tokens=params.min_tokens,
        eos_token_ids=() if params.ignore_eos else request.eos_token_ids,
        stop_token_ids=params.stop_token_ids,
    )


def decode(
    target: ToyTarget,
    request: SamplingRequest,
    drafter: Drafter | None = None,
    *,
    noise: NoiseCache | None = None,
    context_limit: int = 10**9,
    stop_text: Callable[[int], str | None] | None = None,
) -> Decoded:
    """Decode to the end, verifying whatever the drafter proposes."""
    noise = noise or NoiseCache(target.vocab_size)
    done, counter, ending = Decoded(), SpeculationCounter(), ending_of(request, context_limit)
    while done.finish_reason is None:
        drafts = list(drafter(request, noise)) if drafter and request.output_token_ids else []
        tokens = [*request.prompt_token_ids, *request.output_token_ids]
        sampled = sample_rows(target.rows(tokens, drafts), [RowBlock(request, drafts)], noise)
        accepted = accept(drafts, sampled.token_ids[0])
        counter.record(len(drafts), accepted.num_accepted_tokens)
        cut = cut_block(accepted.token_ids, len(request.output_token_ids), ending, stop_text)
        kept = accepted.token_ids[: cut.num_kept]
        if request.params.logprobs is not None:
            done.logprobs += sampled.logprobs(0, len(kept), request.params.logprobs)
        request.commit(kept)
        done.token_ids += kept
        done.finish_reason, done.stop_reason = cut.finish_reason, cut.stop_reason
    done.stats = counter.stats()
    return done


def random_drafter(vocab_size: int, longest: int, rng: random.Random) -> Drafter:
    """Draft anything, of any length, now and then nothing or an invalid token."""
    return lambda request, noise: [rng.randrange(-1, vocab_size) for _ in range(rng.randint(0, longest))]


def scripted_drafter(
    script: Sequence[int], vocab_size: int, longest: int, p_right: float, rng: random.Random
) -> Drafter:
    """Replay a known output, each token right with probability ``p_right``."""

    def draft(request: SamplingRequest, noise: NoiseCache) -> list[int]:
        at = len(request.output_token_ids)
        ahead = [*script[at : at + rng.randint(0, longest)]]
        return [token if rng.random() < p_right else rng.randrange(vocab_size) for token in ahead]

    return draft


def forced_drafter(longest: int) -> Drafter:
    """Draft what the request's own constraints foresee."""
    return lambda request, noise: request.forced_tokens(longest)


def model_drafter(model: ToyTarget, longest: int, rng: random.Random) -> Drafter:
    """Draft from another model's logits with the request's own options and noise, as a real drafter does."""

    def draft(request: SamplingRequest, noise: NoiseCache) -> list[int]:
        num = rng.randint(0, longest)
        tokens = [*request.prompt_token_ids, *request.output_token_ids]
        rows = torch.from_numpy(
            np.stack([model.row([*tokens, *[0] * i]) for i in range(num)] or [model.row(tokens)])
        )
        return sample_drafts(rows[:num], [request], [num], noise)[0]

    return draft
