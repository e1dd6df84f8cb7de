import json

import pytest

from lean_laguna.bench.ab import BASELINE, SPECULATIVE, run_ab
from lean_laguna.bench.rounds import Plan
from lean_laguna.core.types import SamplingParams
from lean_laguna.tasks.prompts import Prompt, PromptSet
from support.backends import ScriptedBackend

PROMPTS = PromptSet("set", (Prompt("p", "easy", "p"), Prompt("q", "hard", "q")))
PLAN = Plan(PROMPTS, SamplingParams(temperature=0, max_tokens=64), repeats=3, warmup=1)
IDS = list(range(41))


def both(speculative=IDS, **kwargs):
    baseline = ScriptedBackend(lambda *_: IDS, step_s=0.1, top={999: -2.0})
    drafting = ScriptedBackend(lambda *_: speculative, step_s=0.12, burst=4, num_draft_tokens=7, **kwargs)
    return run_ab(baseline, drafting, PLAN)


def test_the_speed_up_is_the_ratio_of_decode_speeds():
    result = both()
    assert result.metrics[BASELINE]["decode_tok_per_s"]["median"] == pytest.approx(10)
    assert result.metrics[SPECULATIVE]["decode_tok_per_s"]["median"] == pytest.approx(4 / 0.12)
    assert result.speedup.values == pytest.approx([4 / 1.2] * 3)


def test_every_repeat_of_both_sides_is_compared_with_the_first_baseline_run():
    result = both()
    written = result.to_dict()["parity"]
    assert written["control"] == {"identical": 4, "near-tie": 0, "mismatch": 0}
    assert written["speculative"] == {"identical": 6, "near-tie": 0, "mismatch": 0}
    assert result.num_mismatches == 0


def test_a_prompt_with_a_wrong_repeat_is_one_mismatch():
    calls = iter(range(100))
    wrong = ScriptedBackend(lambda *_: [*IDS[:5], 999] if next(calls) == 3 else IDS, num_draft_tokens=7)
    result = run_ab(ScriptedBackend(lambda *_: IDS), wrong, PLAN)
    assert result.num_mismatches == 1
    assert sum(row["parity"] == "mismatch" for row in result.to_dict()["per_prompt"]) == 1
    assert result.to_dict()["parity"]["differences"][0]["position"] == 5


def test_the_part_for_the_result_file_is_json_and_keeps_sides_apart():
    content = json.loads(json.dumps(both().to_dict()))
    assert "spec_decode_acceptance_length" not in content["sides"][BASELINE]
    assert content["sides"][SPECULATIVE]["spec_decode_acceptance_length"] == pytest.approx(4.0)
    assert len(content["sides"][SPECULATIVE]["spec_decode_per_position_acceptance_rates"]) == 7
    row = content["per_prompt"][0]
    assert row["id"] == "p"
    assert row["baseline"]["completion_tokens"] == 41


def test_answers_of_one_token_leave_no_speed_up():
    short = ScriptedBackend(lambda *_: [1])
    result = run_ab(short, short, PLAN)
    assert result.speedup is None
    assert "speedup" not in result.to_dict()
