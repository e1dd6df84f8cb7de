import math
import statistics
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lean_laguna.bench.statistics import (
    Spread,
    decode_tok_per_s,
    distinct_ngram_share,
    find_suspicious,
    percentile,
    side_metrics,
    speculation_metrics,
)
from lean_laguna.core.types import SamplingParams, SpeculationStats
from support.backends import ScriptedBackend

GREEDY = SamplingParams(temperature=0, max_tokens=None)


def results(lengths, **kwargs):
    backend = ScriptedBackend(lambda prompt, *_: range(int(prompt)), **kwargs)
    return backend.generate([str(n) for n in lengths], GREEDY)


def test_decode_speed_counts_tokens_after_the_first_over_the_time_after_the_first():
    one = results([11], step_s=0.1, prefill_s=5.0)
    assert decode_tok_per_s(one) == pytest.approx(10 / 1.0)


def test_decode_speed_weights_requests_by_their_tokens_and_not_by_chunks():
    mixed = [*results([101], burst=4, step_s=0.1), *results([11], step_s=0.1)]
    assert decode_tok_per_s(mixed) == pytest.approx((100 + 10) / (2.5 + 1.0))


def test_answers_of_one_token_or_none_have_no_decode_phase():
    assert decode_tok_per_s(results([0, 1])) is None
    metrics = side_metrics([results([0, 1])])
    assert "decode_tok_per_s" not in metrics
    assert "mean_tpot_ms" not in metrics
    assert metrics["total_output_tokens"] == 1


def test_time_to_first_token_is_apart_from_decoding():
    metrics = side_metrics([results([11, 21], step_s=0.1, prefill_s=0.5)])
    assert metrics["mean_ttft_ms"] == pytest.approx(500)
    assert metrics["median_tpot_ms"] == pytest.approx(100)
    assert metrics["p99_itl_ms"] == pytest.approx(100)
    assert metrics["duration"] == pytest.approx(0.5 + 1.0 + 0.5 + 2.0)
    assert metrics["output_throughput"] == pytest.approx(32 / 4.0)
    assert metrics["total_input_tokens"] == 4


def test_each_repeat_gives_one_value_and_the_spread_is_kept():
    metrics = side_metrics([results([11], step_s=s) for s in (0.1, 0.2, 0.125)])
    rate = metrics["decode_tok_per_s"]
    assert rate["values"] == pytest.approx([10, 5, 8])
    assert (rate["median"], rate["min"], rate["max"]) == pytest.approx((8, 5, 10))
    assert Spread((8.0, 10.0, 9.0)).relative == pytest.approx(2 / 9)


def test_keys_about_speculation_are_absent_without_a_drafter():
    assert not any("spec" in key for key in side_metrics([results([5])]))


def test_speculation_has_vllm_s_definitions():
    stats = SpeculationStats(10, 30, 15, (9, 4, 2), 12)
    assert speculation_metrics(stats) == {
        "spec_decode_num_drafts": 10,
        "spec_decode_draft_tokens": 30,
        "spec_decode_accepted_tokens": 15,
        "spec_decode_acceptance_rate": 50.0,
        "spec_decode_acceptance_length": 2.5,
        "spec_decode_per_position_acceptance_rates": [0.9, 0.4, 0.2],
    }
    assert speculation_metrics(replace(stats, num_cut_draft_tokens=4))["spec_decode_cut_draft_tokens"] == 4


def test_a_drafter_that_never_drafted_has_counts_but_no_rates():
    metrics = speculation_metrics(SpeculationStats(num_steps=5))
    assert metrics["spec_decode_num_drafts"] == 0
    assert "spec_decode_acceptance_rate" not in metrics
    assert "never proposed" in find_suspicious(metrics)[0]


@pytest.mark.parametrize(
    ("stats", "message"),
    [
        (SpeculationStats(10, 30, 30, (10, 10, 10), 10), "at its ceiling"),
        (SpeculationStats(10, 30, 0, (0, 0, 0), 10), "may not belong"),
    ],
)
def test_acceptance_at_its_floor_or_ceiling_is_flagged(stats, message):
    (found,) = find_suspicious(speculation_metrics(stats))
    assert message in found
    assert find_suspicious(speculation_metrics(SpeculationStats(10, 30, 15, (9, 4, 2), 12))) == []


def test_looping_text_and_a_busy_machine_are_flagged():
    assert "repeat themselves" in find_suspicious({"distinct_8gram_share": 0.2})[0]
    assert "busy" in find_suspicious({"decode_tok_per_s": Spread((10.0, 13.0)).to_dict()})[0]
    assert find_suspicious({"decode_tok_per_s": Spread((10.0, 10.5)).to_dict()}) == []


def test_the_share_of_distinct_ngrams_tells_loops_from_text():
    assert distinct_ngram_share([list(range(50))]) == 1
    assert distinct_ngram_share([[1] * 50]) == pytest.approx(1 / 43)
    assert distinct_ngram_share([[1, 2, 3]]) is None
    assert distinct_ngram_share([]) is None


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.floats(0, 100))
def test_percentiles_are_numpy_s(values, percent):
    assert math.isclose(
        percentile(values, percent), np.percentile(values, percent), rel_tol=1e-9, abs_tol=1e-6
    )
    assert math.isclose(percentile(values, 50), statistics.median(values), rel_tol=1e-9, abs_tol=1e-6)
