"""Each result says what made it: a commit, a script or command that there is, a machine without its paths."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "results").glob("*.json"))
MACHINE_PATH = re.compile(r"(?<![\w.~}/])/(?:root|home|tmp|work|mnt|opt|usr|var|workspace)/")


def _found(given: Any, key: str) -> Iterator[Any]:
    """Return what stands under a key, however deep."""
    if isinstance(given, dict):
        if key in given:
            yield given[key]
        given = list(given.values())
    if isinstance(given, list):
        for part in given:
            yield from _found(part, key)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_result_says_what_made_it(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    given = json.loads(text)
    assert re.search(r"\b[0-9a-f]{40}\b", text), "a commit"
    scripts = set(re.findall(r"\b(\w+\.py)\b", text))
    commands = [argv for argv in _found(given, "argv") if argv[0] == "lean-laguna"]
    assert scripts or commands, "a command"
    assert scripts <= {path.name for path in (ROOT / "benchmarks").glob("*.py")}
    assert list(_found(given, "machine")) or re.search(r"\bH200\b|CPU server", text), "a machine"


@pytest.mark.parametrize(
    "path",
    [ROOT / "README.md", ROOT / "LOG.md", *FILES, *(ROOT / "results").glob("*.md")],
    ids=lambda p: p.name,
)
def test_no_path_of_a_machine_is_told(path: Path) -> None:
    assert not MACHINE_PATH.findall(path.read_text(encoding="utf-8"))
