"""The README's commands are real: each parses, and the shell and Python it shows name things that exist."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from pathlib import Path
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
    best = max(sweep["rows"], key=lambda row: row["decode_tok_per_s"]["median"])
    figures.append(f"best at {best['num_speculative_tokens']}")
    return figures


@pytest.mark.parametrize("figure", _figures())
def test_figure_is_that_of_the_result_file(figure: str) -> None:
    assert figure in README


def test_results_show_no_mismatch() -> None:
    names = ("bench_greedy.json", "bench_t08.json", "sweep.json", "parity_greedy.json", "parity_t08.json")
    for name in names:
        assert _result(name)["parity"]["num_mismatches"] == 0, name
    assert all(run["identical"] for run in _result("long_context.json")["long"])
