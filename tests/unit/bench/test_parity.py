import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lean_laguna.bench.parity import (
    CONTROL,
    NEAR_TIE_MARGIN,
    Comparer,
    Verdict,
    count_kinds,
    first_difference,
    run_parity,
    worst_kind,
)
from lean_laguna.bench.rounds import Plan
from lean_laguna.core.types import SamplingParams
from lean_laguna.spec.noise import gumbel_noise_at
from lean_laguna.tasks.prompts import Prompt, PromptSet
from support.backends import ScriptedBackend

PROMPTS = PromptSet("set", (Prompt("p", "easy", "p"), Prompt("q", "hard", "q")))
PLAN = Plan(PROMPTS, SamplingParams(temperature=0, max_tokens=32))
TRUE = (1, 2, 3, 4, 5)


def always(ids, **kwargs):
    return ScriptedBackend(lambda *_: ids, **kwargs)


def test_the_same_output_is_identical():
    report = run_parity(always(TRUE), {"7 drafts": always(TRUE, burst=3)}, PLAN)
    assert {v.kind for side in report.verdicts.values() for v in side} == {"identical"}
    assert report.num_mismatches == report.num_near_ties == 0
    assert report.num_tokens == 10


def test_a_difference_names_position_and_both_tokens():
    report = run_parity(always(TRUE, top={9: -3.0}), {"x": always((1, 2, 9, 4, 5))}, PLAN)
    verdict = report.verdicts["x"][0]
    assert verdict == Verdict("p", "x", "mismatch", 5, 2, "t3", "t9", 3.0, "token 2: 't3' became 't9'")
    assert report.num_mismatches == 2
    assert [v.kind for v in report.verdicts[CONTROL]] == ["identical", "identical"]


@pytest.mark.parametrize(
    ("margin", "kind"), [(NEAR_TIE_MARGIN * 0.9, "near-tie"), (NEAR_TIE_MARGIN * 1.1, "mismatch")]
)
def test_a_small_margin_makes_a_near_tie(margin, kind):
    verdict = run_parity(always(TRUE, top={9: -margin}), {"x": always((1, 2, 9))}, PLAN).verdicts["x"][0]
    assert verdict.kind == kind
    assert verdict.margin == pytest.approx(margin)


def test_an_unlikely_token_has_no_margin_and_is_a_mismatch():
    verdict = run_parity(always(TRUE), {"x": always((1, 7))}, PLAN).verdicts["x"][0]
    assert (verdict.kind, verdict.margin, verdict.found) == ("mismatch", None, "token 7")


@pytest.mark.parametrize("other", [TRUE[:3], (*TRUE, 6)])
def test_an_output_that_ends_elsewhere_is_a_mismatch(other):
    verdict = run_parity(always(TRUE), {"x": always(other)}, PLAN).verdicts["x"][0]
    assert verdict.kind == "mismatch"
    assert verdict.position == min(len(other), 5)
    assert "end of output" in (verdict.expected, verdict.found)


def test_a_baseline_that_does_not_repeat_itself_shows_in_the_control():
    baseline = ScriptedBackend(lambda prompt, params, call: (1, 2) if call % 2 else (1, 3))
    report = run_parity(baseline, {"x": always((1, 3))}, PLAN)
    assert report.verdicts[CONTROL][0].kind == "mismatch"


def test_text_or_finish_reason_alone_can_differ():
    result = always(TRUE).generate(["p"], SamplingParams())[0]
    comparer = Comparer(always(TRUE), PLAN)
    assert comparer.compare(0, result, result, "x").kind == "identical"
    for change in ({"text": "?"}, {"finish_reason": "stop"}):
        verdict = comparer.compare(0, result, dataclasses.replace(result, **change), "x")
        assert verdict.kind == "mismatch"
        assert next(iter(change)) in verdict.reason


def test_the_margin_of_a_sampled_token_has_temperature_and_noise_in_it():
    plan = dataclasses.replace(PLAN, params=SamplingParams(temperature=0.5, max_tokens=32), seed=11)
    verdict = run_parity(always(TRUE, top={9: -1.0}), {"x": always((1, 2, 9))}, plan).verdicts["x"][0]
    noise = gumbel_noise_at([11, 11], [1 + 2, 1 + 2], np.array([3, 9]))
    assert verdict.margin == pytest.approx(0.0 + noise[0] - (-1.0 / 0.5 + noise[1]))


def test_a_run_for_the_scores_keeps_every_option_but_the_limit():
    params = SamplingParams(temperature=0, max_tokens=32, min_tokens=20, stop=("x",))
    baseline = always(TRUE, top={9: -1.0})
    run_parity(baseline, {"x": always((1, 2, 9))}, dataclasses.replace(PLAN, params=params))
    asked = [p for _, p in baseline.calls if p.logprobs is not None]
    assert {(p.max_tokens, p.min_tokens, p.stop) for p in asked} == {(3, 3, ("x",))}


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), max_size=6))
def test_the_first_difference_is_where_common_prefixes_end(a, b):
    found = first_difference(a, b)
    if a == b:
        assert found is None
    else:
        assert found is not None
        assert a[:found] == b[:found]
        assert a[: found + 1] != b[: found + 1]


def test_the_gravest_verdict_counts():
    kinds = [Verdict("p", "x", kind, 1) for kind in ("identical", "mismatch", "near-tie")]
    assert worst_kind(kinds) == "mismatch"
    assert worst_kind([]) == "identical"
    assert count_kinds(kinds) == {"identical": 1, "near-tie": 1, "mismatch": 1}
