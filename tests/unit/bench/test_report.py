import json
import re

import pytest
from rich.console import Console

from lean_laguna.bench.ab import run_ab
from lean_laguna.bench.parity import run_parity
from lean_laguna.bench.report import ab_report, heading, parity_report, sweep_report, sweep_svg, to_html
from lean_laguna.bench.results import describe
from lean_laguna.bench.rounds import Plan
from lean_laguna.bench.sweep import run_sweep
from lean_laguna.core.files import atomic_write_json
from lean_laguna.core.types import SamplingParams
from lean_laguna.tasks.prompts import Prompt, PromptSet
from support.backends import ScriptedBackend

PROMPTS = PromptSet("set", (Prompt("fib", "easy", "p"), Prompt("<lcs>", "hard", "q")))
PLAN = Plan(PROMPTS, SamplingParams(temperature=0, max_tokens=64), repeats=2)
IDS = list(range(41))
WRONG = [*IDS[:7], 999]


def sides(ids=IDS):
    baseline = ScriptedBackend(lambda *_: IDS)
    return baseline, ScriptedBackend(lambda *_: ids, burst=4, step_s=0.12, num_draft_tokens=7)


def through_a_file(tmp_path, content):
    atomic_write_json(tmp_path / "r.json", content)
    return json.loads((tmp_path / "r.json").read_text())


@pytest.fixture
def ab(tmp_path):
    a, b = sides()
    engines = {"baseline": a.info(), "speculative": b.info()}
    return through_a_file(
        tmp_path, describe("ab", PLAN, run_ab(a, b, PLAN).to_dict(), engines=engines, argv=["x"])
    )


@pytest.fixture
def sweep(tmp_path):
    a, b = sides()
    measured = run_sweep({0: a, 3: b, 7: sides(WRONG)[1]}, PLAN).to_dict()
    return through_a_file(tmp_path, describe("sweep", PLAN, measured, engines={"drafting": b.info()}))


@pytest.fixture
def parity(tmp_path):
    a, b = sides(WRONG)
    report = run_parity(a, {"7": b}, PLAN)
    return through_a_file(
        tmp_path, describe("parity", PLAN, report.to_dict(), engines={"drafting": b.info()})
    )


def shown(renderable, width=100):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(renderable)
        return console.export_text()


def test_a_result_says_where_it_comes_from(ab):
    assert ab["schema_version"] == 1
    assert ab["argv"] == ["x"]
    assert ab["prompts"] == {"name": "set", "num_prompts": 2, "sha256": PROMPTS.sha256}
    assert ab["sampling"] == {"temperature": 0, "max_tokens": 64}
    assert {"git_commit", "versions", "machine", "date", "seed", "repeats", "engines"} <= set(ab)
    assert ab["process_peak_rss_bytes"] > 2**20


def test_the_ab_report_shows_speed_acceptance_and_parity(ab):
    text = shown(ab_report(ab))
    for piece in ("3.33×", "10.0", "33.3", "4.00", "0 mismatches", "<lcs>", "accepted by draft position"):
        assert piece in text
    assert "fib" not in shown(ab_report(ab, per_prompt=False))


def test_positions_that_a_length_only_tried_has_are_left_out(ab):
    drafted = ab["sides"]["speculative"]
    drafted["spec_decode_per_position_acceptance_rates"] = [0.5, 0.0, 0.25, 0.0, 0.0]
    text = shown(ab_report(ab))
    assert "  5  " in text
    assert "tokens a step, of 6" in text
    ab["engines"]["speculative"]["num_speculative_tokens"] = "auto"
    text = shown(ab_report(ab))
    assert "  3  " in text
    assert "  4  " not in text
    assert "a step with drafts" in text


def test_the_heading_names_target_drafter_prompts_and_machine(ab):
    text = heading(ab).plain
    assert "target (10.0 M parameters) · drafter drafter · draft length 7" in text
    assert "2 prompts (set) × up to 64 tokens · greedy · 2 repeats" in text


def test_the_sweep_report_marks_the_best_and_the_wrong(sweep):
    text = shown(sweep_report(sweep))
    assert "best: 3 draft tokens" in text
    assert "4 differ" in text
    assert "<svg" in sweep_svg(sweep)


def test_what_was_compared_is_said(ab):
    assert "first run without drafter, token for token" in shown(ab_report(ab))
    ab["engines"]["baseline"] |= {"base_url": "http://x", "limits": ["no ids: outputs are compared as text"]}
    assert "first run without drafter, text for text" in shown(ab_report(ab))


def test_the_parity_report_gives_a_verdict_per_prompt(parity):
    text = shown(parity_report(parity))
    assert "2 mismatches, 0 near-ties in 4 comparisons over 82 tokens" in text
    assert "token 7" in text


@pytest.mark.parametrize("width", [60, 80, 140])
def test_reports_fit_the_terminal(ab, sweep, parity, width):
    for one in (ab_report(ab), sweep_report(sweep), parity_report(parity), heading(ab)):
        assert max(len(line) for line in shown(one, width).split("\n")) <= width


def test_the_page_is_static_escaped_and_complete(ab, sweep, parity):
    for result in (ab, sweep, parity):
        page = to_html(result)
        assert page.startswith("<!doctype html>")
        assert "<lcs>" not in page
        assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in page
        assert "<script" not in page
        assert "git_commit" in page
    page = to_html(ab)
    assert page.count("<svg") == 2
    assert "<th>without drafter</th><th>with drafter</th>" in page
    assert "<th>baseline" not in page
    assert re.search(r"drafter\s+\(3\.33 to 3\.33 over the repeats\)", page)
    ab["speedup"]["values"] = ab["speedup"]["values"][:1]
    assert "over the repeats" not in to_html(ab)


def test_a_result_holds_no_infinity(ab):
    json.dumps(ab, allow_nan=False)
