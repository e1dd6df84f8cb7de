"""The README's commands are real: each parses, and the shell and Python it shows name things that exist."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from lean_laguna.cli.convert import CONVERSIONS
from lean_laguna.cli.main import COMMANDS as COMMAND_NAMES

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^(?:    \S.*\n)+", README, re.M)
COMMANDS = sorted(
    {line.split("#")[0].strip() for block in BLOCKS for line in block.splitlines() if "lean-laguna " in line}
)
TARGETS = sorted(set(re.findall(r"`?make ([a-z-]+)`?", README)))
RESULTS = sorted(set(re.findall(r"results/[\w./-]+\.(?:json|svg|html)", README)))
LINKS = sorted({link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link} - set(RESULTS))


def test_the_readme_shows_commands_targets_and_results() -> None:
    assert COMMANDS
    assert TARGETS
    assert RESULTS


@pytest.mark.parametrize("command", COMMANDS)
def test_command_is_understood(command: str) -> None:
    words = shlex.split(command)
    at = next(i for i, word in enumerate(words) if word.endswith("lean-laguna"))
    name, *rest = words[at + 1 :]
    module = CONVERSIONS[rest.pop(0)] if name == "convert" else name
    assert name in COMMAND_NAMES
    # Not with --help, which would excuse every other word.
    importlib.import_module(f"lean_laguna.cli.{module}").build_parser().parse_strictly(rest)


@pytest.mark.parametrize("target", TARGETS)
def test_make_target_exists(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)


@pytest.mark.parametrize("path", [*RESULTS, *LINKS])
def test_file_exists(path: str) -> None:
    assert (ROOT / path).exists()


def _result(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "results" / name).read_text(encoding="utf-8"))


def _figures() -> list[str]:
    greedy, sampled = _result("bench_greedy.json"), _result("bench_t08.json")
    reference, long, sweep = (
        _result("against_transformers.json"),
        _result("long_context.json"),
        _result("sweep.json"),
    )
    figures = []
    for run in (greedy, sampled):
        drafted = run["sides"]["speculative"]
        figures += [
            f"{run['speedup']['median']:.2f}×",
            f"{run['sides']['baseline']['decode_tok_per_s']['median']:.0f} to "
            f"{drafted['decode_tok_per_s']['median']:.0f} tok/s",
            f"mean acceptance length {drafted['spec_decode_acceptance_length']:.2f}",
            f"distinct 8-grams {100 * drafted['distinct_8gram_share']:.0f} %",
        ]
    for name in ("parity_greedy.json", "parity_t08.json"):
        parity = _result(name)["parity"]
        figures.append(f"{parity['num_mismatches']} mismatches")
    medians = [reference["decode_tok_per_s"][side]["median"] for side in ("transformers", "lean_laguna")]
    figures.append(f"{reference['ratio']:.2f}×, {medians[0]:.0f} against {medians[1]:.0f} tok/s")
    figures.append(f"{long['prefix']['num_cached_tokens']} tokens from the cache")
    off, *_ = sweep["rows"]
    best = max(sweep["rows"], key=lambda row: row["decode_tok_per_s"]["median"])
    gain = best["decode_tok_per_s"]["median"] / off["decode_tok_per_s"]["median"]
    figures.append(f"best at {best['num_speculative_tokens']}: {gain:.2f}×")
    speeds = [greedy["sides"][side]["decode_tok_per_s"]["median"] for side in ("baseline", "speculative")]
    excerpt = f" decode, tok/s {speeds[0]:>27.1f} {speeds[1]:>14.1f}   {greedy['speedup']['median']:.2f}×"
    figures.append(excerpt)
    return figures


@pytest.mark.parametrize("figure", _figures())
def test_figure_is_that_of_the_result_file(figure: str) -> None:
    assert figure in README


def test_results_show_no_mismatch() -> None:
    names = ("bench_greedy.json", "bench_t08.json", "sweep.json", "parity_greedy.json", "parity_t08.json")
    for name in names:
        assert _result(name)["parity"]["num_mismatches"] == 0, name
    assert all(run["identical"] for run in _result("long_context.json")["long"])


BESIDE = {
    "decode, one stream, no drafter, 2,048 tokens of context": ("plain: 2048", "tok_per_s"),
    "decode with 32,768 tokens of context, no drafter": ("plain: 32768", "tok_per_s"),
    "time to first token, prompt of 2,048": ("plain: 2048", "ttft_ms"),
    "time to first token, prompt of 32,768": ("plain: 32768", "ttft_ms"),
    "decode, one stream, 7 drafts": ("drafts: 2048", "tok_per_s"),
    "two streams, best setting of each": ("2 streams", None),
    "four streams": ("4 streams", None),
    "eight streams": ("8 streams", None),
    "sixteen streams": ("16 streams", None),
}
"""Rows of the table beside vLLM: the measurement, or the end of its name, and the figure of it."""


def _beside(is_ours: bool, name: str, key: str | None) -> list[float]:
    """Return what a row may say of a side: the best setting's median, or its better run."""
    found = _result("gpu_beside_vllm_h200.json")["main"]["sides"]
    runs = [
        entry[key] if key else entry
        for side, measured in found.items()
        if side.startswith("vllm") != is_ours and side != "ours-again"
        for what, entry in measured.items()
        if what.endswith(name)
    ]
    best = max(runs, key=median)
    return [median(best), *([] if is_ours else [max(best)])]


@pytest.mark.parametrize("label", BESIDE)
def test_figure_beside_vllm_is_that_of_the_result_file(label: str) -> None:
    line = next(line for line in README.splitlines() if line.startswith(f"| {label} |"))
    ours, theirs, ratio = (float(cell) for cell in re.findall(r"\| \**([\d.]+)", line))
    assert any(abs(ours - right) <= 0.5 for right in _beside(True, *BESIDE[label]))
    assert any(abs(theirs - right) <= 0.5 for right in _beside(False, *BESIDE[label]))
    # Of the figures before they were rounded, too.
    assert abs(ratio - ours / theirs) <= 0.005 + ratio * (0.5 / ours + 0.5 / theirs)


def test_mismatches_on_a_gpu_are_those_of_the_result_files() -> None:
    for name in ("gpu_engine_cuda_h200.json", "gpu_engine_h200.json"):
        compared = _result(name)["nano"]["compared"]
        assert compared["token_mismatches"] == compared["logits_mismatches"] == 0, name
        assert str(compared["tokens"]) in README, name
