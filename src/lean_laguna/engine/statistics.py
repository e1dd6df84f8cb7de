"""Counts of an engine since it was made."""

from __future__ import annotations

from dataclasses import dataclass, field

from lean_laguna.core.types import SpeculationStats
from lean_laguna.engine.scheduler import Scheduler
from lean_laguna.spec.statistics import SpeculationCounter


@dataclass(frozen=True)
class EngineStats:
    """A snapshot; counts grow only, gauges are of the moment.

    Attributes:
        num_requests: Requests accepted so far.
        num_finished_requests: Of those, finished or aborted.
        num_prompt_tokens: Prompt tokens of requests whose prompt was started.
        num_cached_prompt_tokens: Of those, tokens taken from the prefix cache.
        num_generated_tokens: Output tokens.
        num_running: Sequences holding KV blocks now.
        num_waiting: Sequences not yet admitted.
        kv_usage: Per KV group with layers, the share of its blocks that sequences refer to, in [0, 1].
        num_steps: Engine steps that computed something.
        prefill_s: Seconds spent in prefill passes, sampling included.
        decode_s: Seconds spent in decode steps: drafting, verifying, sampling.
        speculation: Drafts and acceptance over all requests.
        draft_length_reason: Why the draft length is what it is, one line; None without a drafter.
    """

    num_requests: int = 0
    num_finished_requests: int = 0
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_running: int = 0
    num_waiting: int = 0
    kv_usage: dict[str, float] = field(default_factory=dict)
    num_steps: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    draft_length_reason: str | None = None

    @property
    def prefix_cache_hit_rate(self) -> float | None:
        """Share of prompt tokens taken from the prefix cache; None before the first prompt."""
        return self.num_cached_prompt_tokens / self.num_prompt_tokens if self.num_prompt_tokens else None


class EngineCounters:
    """What grows while the engine runs; owned by it. Names as in `EngineStats`."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_finished_requests = 0
        self.num_generated_tokens = 0
        self.num_steps = 0
        self.prefill_s = 0.0
        self.decode_s = 0.0
        self.speculation = SpeculationCounter()

    def snapshot(self, scheduler: Scheduler, draft_length_reason: str | None) -> EngineStats:
        """Return the counts, with what the scheduler holds now."""
        usage = {
            group.name: pool.num_in_use / max(1, pool.capacity)
            for group, pool in zip(scheduler.groups, scheduler.pools, strict=True)
        }
        return EngineStats(
            num_requests=self.num_requests,
            num_finished_requests=self.num_finished_requests,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_cached_prompt_tokens=scheduler.num_cached_tokens,
            num_generated_tokens=self.num_generated_tokens,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_usage=usage,
            num_steps=self.num_steps,
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
            speculation=self.speculation.stats(),
            draft_length_reason=draft_length_reason,
        )
