"""Counters and histograms in Prometheus' format, under vLLM's names.

Source: metric names, labels and buckets of vLLM 0.30: v1/metrics/loggers.py, v1/spec_decode/metrics.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from lean_laguna.core.types import RequestOutput, SamplingParams
from lean_laguna.engine.llm import LLM
from lean_laguna.engine.output import CompletionDelta
from lean_laguna.engine.sequence import RequestState
from lean_laguna.engine.statistics import EngineStats

# fmt: off
FIRST_TOKEN_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0, 160.0, 640.0, 2560.0,
)
TOKEN_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0,
)
REQUEST_BUCKETS_S = (
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
    240.0, 480.0, 960.0, 1920.0, 7680.0,
)
# fmt: on
COUNT_BUCKETS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """The server's registry; told by the engine's thread, read on the event loop."""

    def __init__(self, model_name: str):
        self._registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        self._first_token = self._histogram("time_to_first_token_seconds", FIRST_TOKEN_BUCKETS_S)
        self._between = self._histogram("inter_token_latency_seconds", TOKEN_BUCKETS_S)
        self._per_token = self._histogram("request_time_per_output_token_seconds", TOKEN_BUCKETS_S)
        self._whole = self._histogram("e2e_request_latency_seconds", REQUEST_BUCKETS_S)
        self._decode = self._histogram("request_decode_time_seconds", REQUEST_BUCKETS_S)
        self._prefill = self._histogram("request_prefill_time_seconds", REQUEST_BUCKETS_S)
        self._num_prompt = self._histogram("request_prompt_tokens", COUNT_BUCKETS)
        self._num_generated = self._histogram("request_generation_tokens", COUNT_BUCKETS)
        self._n = self._histogram("request_params_n", (1, 2, 5, 10, 20))
        self._success = Counter(
            "vllm:request_success",
            "Completions that ended, by reason.",
            [*self._labels, "finished_reason"],
            registry=self._registry,
        )
        self._reasons = {
            reason: self._success.labels(*self._labels.values(), reason)
            for reason in ("stop", "length", "abort", "error")
        }
        self._last_token_s: dict[tuple[str, int], float] = {}
        self._cache: Gauge | None = None
        self._state = _EngineMetrics(self._labels)
        self._registry.register(self._state)

    def loaded(self, llm: LLM) -> None:
        """Describe the engine that serves from now on."""
        config, pools = llm.config, llm.engine.scheduler.pools
        info = {
            "block_size": str(config.kv_block_size),
            "cache_dtype": config.kv_cache_dtype,
            "num_gpu_blocks": str(sum(pool.capacity for pool in pools)),
            "enable_prefix_caching": str(config.enable_prefix_caching),
            "kv_cache_memory_bytes": str(llm.engine.kv_bytes),
        }
        if self._cache is None:
            self._cache = Gauge(
                "vllm:cache_config_info",
                "How the KV cache is set up.",
                [*info, "engine"],
                registry=self._registry,
            )
        self._cache.clear()
        self._cache.labels(*info.values(), "0").set(1)

    def token(self, request: RequestState, delta: CompletionDelta) -> None:
        """Record that a completion grew."""
        now_s, key = time.perf_counter(), (delta.request_id, delta.index)
        last_s = self._last_token_s.get(key)
        if last_s is None:
            self._first_token.observe(now_s - request.arrival_s)
        else:
            self._between.observe(now_s - last_s)
        if delta.finish_reason is None:
            self._last_token_s[key] = now_s
        else:
            self._last_token_s.pop(key, None)
            self._reasons[delta.finish_reason].inc()

    def finished(self, output: RequestOutput, params: SamplingParams) -> None:
        """Record a request that ended by itself."""
        times = output.times
        self._n.observe(params.n)
        self._num_prompt.observe(len(output.prompt_token_ids))
        for completion in output.outputs:
            self._num_generated.observe(len(completion.token_ids))
        if times.first_token_s is None or times.last_token_s is None:
            return
        decode_s = times.last_token_s - times.first_token_s
        self._whole.observe(times.last_token_s - times.arrival_s)
        self._prefill.observe(times.first_token_s - times.arrival_s)
        self._decode.observe(decode_s)
        num_later = max(len(completion.token_ids) for completion in output.outputs) - 1
        if num_later > 0:
            self._per_token.observe(decode_s / num_later)

    def aborted(self, num_seqs: int) -> None:
        """Record completions whose client left."""
        self._reasons["abort"].inc(num_seqs)

    def failed(self, num_seqs: int) -> None:
        """Record completions that failed."""
        self._reasons["error"].inc(num_seqs)

    def forget(self, request: RequestState) -> None:
        """Drop what is kept about a request that is gone."""
        for index in range(request.params.n):
            self._last_token_s.pop((request.request_id, index), None)

    def render(self, stats: EngineStats | None, max_draft_tokens: int) -> bytes:
        """Return the exposition text.

        Args:
            stats: The engine's counts, or None before there is one.
            max_draft_tokens: Longest draft: the positions to report.
        """
        self._state.stats, self._state.max_draft_tokens = stats, max_draft_tokens
        return generate_latest(self._registry)

    def _histogram(self, name: str, buckets: Sequence[float]) -> Histogram:
        text = name.replace("_", " ").capitalize() + "."
        family = Histogram(
            f"vllm:{name}", text, list(self._labels), registry=self._registry, buckets=tuple(buckets)
        )
        return family.labels(**self._labels)


class _EngineMetrics:
    """Turns a snapshot of the engine's counts into metrics at each reading."""

    def __init__(self, labels: dict[str, str]):
        self._labels = labels
        self.stats: EngineStats | None = None
        self.max_draft_tokens = 0

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families."""
        stats = self.stats
        if stats is None:
            return
        yield self._gauge("num_requests_running", "Completions being computed.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Completions not yet started.", stats.num_waiting)
        usage = max(stats.kv_usage.values(), default=0.0)
        yield self._gauge("kv_cache_usage_perc", "Share of the fullest KV pool in use, 0 to 1.", usage)
        counts = {
            "prompt_tokens": ("Prompt tokens of requests that were started.", stats.num_prompt_tokens),
            "generation_tokens": ("Output tokens.", stats.num_generated_tokens),
            "prefix_cache_queries": ("Prompt tokens looked up.", stats.num_prompt_tokens),
            "prefix_cache_hits": ("Prompt tokens found in the cache.", stats.num_cached_prompt_tokens),
            "prompt_tokens_cached": ("Prompt tokens found in the cache.", stats.num_cached_prompt_tokens),
            "num_preemptions": ("Requests put back; this engine never does.", 0),
        }
        for name, (text, value) in counts.items():
            yield self._counter(name, text, value)
        if self.max_draft_tokens:
            yield from self._speculation(stats)

    def _speculation(self, stats: EngineStats) -> Iterator[Metric]:
        counts = stats.speculation
        yield self._counter("spec_decode_num_drafts", "Steps with drafts, per sequence.", counts.num_drafts)
        yield self._counter("spec_decode_num_draft_tokens", "Draft tokens verified.", counts.num_draft_tokens)
        yield self._counter(
            "spec_decode_num_accepted_tokens", "Draft tokens accepted.", counts.num_accepted_tokens
        )
        yield self._counter(  # ours: vLLM cuts none
            "spec_decode_num_cut_draft_tokens",
            "Draft tokens made and not verified, for want of confidence.",
            counts.num_cut_draft_tokens,
        )
        family = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position.",
            labels=[*self._labels, "position"],
        )
        accepted = counts.num_accepted_tokens_per_pos
        for position in range(max(self.max_draft_tokens, len(accepted))):
            value = accepted[position] if position < len(accepted) else 0
            family.add_metric([*self._labels.values(), str(position)], value)
        yield family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family
