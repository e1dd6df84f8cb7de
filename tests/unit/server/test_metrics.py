import dataclasses

from lean_laguna.core.types import SamplingParams, SpeculationStats
from lean_laguna.server.metrics import Metrics
from support.engines import dflash, make_engine, tokens_of

NAMES = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prompt_tokens_total"),
    *("generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total"),
    *("request_success_total", "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_count"),
    *("e2e_request_latency_seconds_sum", "spec_decode_num_drafts_total"),
    *("spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"),
    *("spec_decode_num_accepted_tokens_per_pos_total", "spec_decode_num_cut_draft_tokens_total"),
)


def run(metrics, n=1):
    engine = make_engine(dflash())
    state = engine.add_request(tokens_of(0, 9), SamplingParams(n=n, max_tokens=12, ignore_eos=True))
    while engine.has_unfinished:
        for delta in engine.step():
            metrics.token(state, delta)
    metrics.finished(state.snapshot(), state.params)
    return engine


def value(text, name, *labels):
    lines = [line for line in text.splitlines() if line.startswith(f"vllm:{name}{{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if all(label in line for label in labels))


def test_the_names_that_tools_read_are_there_and_add_up():
    metrics = Metrics("m")
    engine = run(metrics, n=2)
    stats = engine.stats()
    text = metrics.render(stats, 15).decode()
    for name in NAMES:
        assert f"vllm:{name}{{" in text, name
    assert value(text, "generation_tokens_total") == 24
    assert value(text, "request_success_total", 'finished_reason="length"') == 2
    assert value(text, "time_to_first_token_seconds_count") == 2
    assert value(text, "request_generation_tokens_sum") == 24
    drafted = value(text, "spec_decode_num_draft_tokens_total")
    assert drafted == stats.speculation.num_draft_tokens
    accepted = value(text, "spec_decode_num_accepted_tokens_per_pos_total")
    assert accepted == value(text, "spec_decode_num_accepted_tokens_total")
    assert text.count("per_pos_total{") == 15  # every position from the start on
    assert 'model_name="m"' in text


def test_drafts_that_were_cut_are_counted():
    metrics = Metrics("m")
    stats = dataclasses.replace(run(metrics).stats(), speculation=SpeculationStats(num_cut_draft_tokens=7))
    assert value(metrics.render(stats, 15).decode(), "spec_decode_num_cut_draft_tokens_total") == 7


def test_without_a_drafter_or_an_engine_there_are_no_such_series():
    assert "spec_decode" not in Metrics("m").render(make_engine().stats(), 0).decode()
    assert "num_requests_running" not in Metrics("m").render(None, 0).decode()


def test_nothing_is_kept_of_requests_that_ended_or_were_left():
    metrics = Metrics("m")
    run(metrics, n=3)
    engine = make_engine()
    state = engine.add_request(tokens_of(0, 9), SamplingParams(n=2, max_tokens=12, ignore_eos=True))
    for _ in range(4):
        for delta in engine.step():
            metrics.token(state, delta)
    metrics.forget(state)
    assert not metrics._last_token_s
