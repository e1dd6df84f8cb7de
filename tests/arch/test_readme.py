"""The README's commands are real: each parses, and the shell and Python it shows name things that exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

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
    call = [sys.executable, "-m", "lean_laguna.cli.main", *words[at + 1 :], "--help"]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]


@pytest.mark.parametrize("target", TARGETS)
def test_make_target_exists(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)


@pytest.mark.parametrize("path", [*RESULTS, *LINKS])
def test_file_exists(path: str) -> None:
    assert (ROOT / path).exists()
