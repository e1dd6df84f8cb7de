import json

import pytest

from lean_laguna.bench.rounds import Plan
from lean_laguna.bench.sweep import run_sweep
from lean_laguna.core.types import SamplingParams
from lean_laguna.tasks.prompts import Prompt, PromptSet
from support.backends import ScriptedBackend

PLAN = Plan(PromptSet("s", (Prompt("p", "", "p"),)), SamplingParams(temperature=0, max_tokens=64), repeats=2)
IDS = list(range(43))


def drafting(length, burst, step_s, ids=IDS):
    return ScriptedBackend(lambda *_: ids, burst=burst, step_s=step_s, num_draft_tokens=length)


def test_the_fastest_length_is_the_best_and_rows_ascend():
    sides = {7: drafting(7, 3, 0.2), 0: ScriptedBackend(lambda *_: IDS), 3: drafting(3, 3, 0.15)}
    result = run_sweep(sides, PLAN)
    assert [row.num_speculative_tokens for row in result.rows] == [0, 3, 7]
    assert [row.tok_per_s for row in result.rows] == pytest.approx([10, 20, 15])
    assert result.best.num_speculative_tokens == 3
    assert result.rows[0].speedup is None
    assert result.rows[2].speedup.median == pytest.approx(1.5)
    assert result.num_mismatches == 0


def test_off_is_best_where_drafting_never_pays():
    result = run_sweep({0: ScriptedBackend(lambda *_: IDS), 3: drafting(3, 1, 0.2)}, PLAN)
    assert result.best.num_speculative_tokens == 0
    assert json.loads(json.dumps(result.to_dict()))["best_num_speculative_tokens"] == 0


def test_a_wrong_length_shows_in_its_row_alone():
    sides = {0: ScriptedBackend(lambda *_: IDS), 3: drafting(3, 2, 0.1), 5: drafting(5, 2, 0.1, ids=[1, 2])}
    rows = run_sweep(sides, PLAN).to_dict()["rows"]
    assert [row["parity"]["mismatch"] for row in rows] == [0, 0, 2]


def test_a_busy_machine_is_told():
    speeds = iter([0.1, 0.1, 0.2])

    class Slowing(ScriptedBackend):
        def generate(self, *args, **kwargs):
            self.step_s = next(speeds, 0.1)
            return super().generate(*args, **kwargs)

    quiet = run_sweep({0: ScriptedBackend(lambda *_: IDS), 3: drafting(3, 3, 0.15)}, PLAN)
    assert quiet.to_dict()["warnings"] == []
    result = run_sweep({0: Slowing(lambda *_: IDS), 3: drafting(3, 3, 0.15)}, PLAN)
    assert "the machine was busy" in result.to_dict()["warnings"][0]
