"""The training corpus: pinned, permissively licensed distributions in; documents and a manifest out.

The manifest says which file of which distribution was used and its checksum; it holds no text. Held-out
distributions are read first, so that a training file which repeats held-out text is dropped, never the
reverse.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lean_laguna.core.errors import DataError
from lean_laguna.core.files import atomic_write_text
from lean_laguna.train.cleaning import (
    Deduplicator,
    NgramFilter,
    clean_text,
    documented_functions,
    humaneval_texts,
    parse_module,
    reject_reason,
)
from lean_laguna.train.recipe import CorpusRecipe
from lean_laguna.train.sources import (
    Distribution,
    SourceFile,
    normalise_name,
    read_wheel,
    standard_library,
)


@dataclass
class Corpus:
    """Documents by split, chat pairs, and what the manifest says about them.

    Attributes:
        documents: ``train`` and ``val``, each a list of texts.
        chat: (instruction, code) pairs from training distributions.
        manifest: Distributions, versions, licences, files with checksums, and drop counts; no text.
    """

    documents: dict[str, list[str]] = field(default_factory=lambda: {"train": [], "val": []})
    chat: list[tuple[str, str]] = field(default_factory=list)
    manifest: dict[str, Any] = field(default_factory=dict)


def build_corpus(
    recipe: CorpusRecipe,
    wheels: Path,
    *,
    on_distribution: Callable[[str], None] = lambda line: None,
    processes: int | None = None,
) -> Corpus:
    """Read every distribution of the recipe that is present and permitted.

    Args:
        recipe: What to read and what to leave out.
        wheels: Folder of wheels, from :func:`lean_laguna.train.sources.fetch_wheels`.
        on_distribution: Called with one line for each distribution.
        processes: Workers that parse files; None is one a core, 1 parses in this process.

    Raises:
        DataError: No wheel at all, or the decontamination data is missing.
    """
    by_name = _pinned_wheels(recipe, wheels, on_distribution)
    evaluation = by_name.pop(normalise_name(recipe.decontaminate_with.split("==")[0]), None)
    if evaluation is None:
        raise DataError(f"'{wheels}' lacks the wheel of {recipe.decontaminate_with}; fetch it first")
    ngrams = NgramFilter(humaneval_texts(evaluation.root), recipe.ngram)
    deduplicator = Deduplicator(recipe.max_line_overlap)
    corpus = Corpus()
    entries = []
    for name in recipe.held_out:
        if (held := by_name.get(normalise_name(name))) is None or held.licence is None:
            on_distribution(f"held-out '{name}' is left out: no wheel, or a licence that is not permitted")
    with _parallel_map(processes) as parallel_map:
        for distribution, split in _in_order(recipe, by_name):
            entry = _add_distribution(corpus, recipe, distribution, split, deduplicator, ngrams, parallel_map)
            entries.append(entry)
            on_distribution(f"{split:5} {entry['name']} {entry['version']}: {entry['text_bytes']:,} bytes")
    excluded = [
        {"name": d.name, "version": d.version, "reason": "licence unknown, mixed or not permissive"}
        for d in by_name.values()
        if d.licence is None
    ]
    corpus.manifest = {"distributions": entries, "excluded": excluded, "ngram": recipe.ngram}
    return corpus


def write_manifest(corpus: Corpus, path: Path) -> str:
    """Write the manifest as JSON, and return its SHA-256."""
    text = json.dumps(corpus.manifest, indent=1, sort_keys=True)
    atomic_write_text(path, text)
    return hashlib.sha256(text.encode()).hexdigest()


def short_manifest(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest with each distribution's files folded into their number and one checksum.

    The checksum is the SHA-256 of the lines ``<file sha256>  <path>`` in path order; this is what ships.
    """
    entries = []
    for entry in manifest["distributions"]:
        lines = "".join(f"{file['sha256']}  {file['path']}\n" for file in entry["files"])
        folded = {"files": len(entry["files"]), "files_sha256": hashlib.sha256(lines.encode()).hexdigest()}
        entries.append({**entry, **folded})
    return {**manifest, "distributions": entries}


def _pinned_wheels(
    recipe: CorpusRecipe, wheels: Path, report: Callable[[str], None]
) -> dict[str, Distribution]:
    """Read the folder's wheels by name; one of another version than the recipe's is left out."""
    pairs = [r.partition("==")[::2] for r in (*recipe.requirements, recipe.decontaminate_with)]
    pins = {normalise_name(name): version for name, version in pairs}
    found = {}
    for distribution in map(read_wheel, sorted(wheels.glob("*.whl"))):
        pinned = pins.get(distribution.name)
        if pinned == distribution.version:
            found[distribution.name] = distribution
        else:
            wanted = f"pins {pinned}" if pinned else "does not name it"
            report(f"left out: {distribution.name} {distribution.version}; the recipe {wanted}")
    return found


def _in_order(recipe: CorpusRecipe, by_name: dict[str, Distribution]) -> Iterator[tuple[Distribution, str]]:
    """Held-out distributions first, then the training ones in the recipe's order."""
    wanted = [normalise_name(r.split("==")[0]) for r in recipe.requirements]
    held_out = [normalise_name(n) for n in recipe.held_out]
    for name in held_out:
        if name in by_name and by_name[name].licence:
            yield by_name[name], "val"
    if recipe.include_stdlib:
        yield standard_library(), "train"
    for name in wanted:
        if name in by_name and name not in held_out and by_name[name].licence:
            yield by_name[name], "train"


@dataclass(frozen=True)
class _Inspected:
    """One file after the checks that need no memory of other files."""

    file: SourceFile
    text: str
    reason: str | None
    chat: list[tuple[str, str]]


def _inspect(file: SourceFile) -> _Inspected:
    text = clean_text(file.text)
    reason = reject_reason(file.text, text)
    if reason is None:
        tree = parse_module(text)
        if tree is None:
            reason = "does not parse"
        elif not file.is_test:
            return _Inspected(file, text, None, documented_functions(text, tree))
    return _Inspected(file, text, reason, [])


@contextlib.contextmanager
def _parallel_map(processes: int | None) -> Iterator[Callable[..., Iterable[_Inspected]]]:
    """Yield a map over files that keeps their order; workers are spawned: a fork would copy our threads."""
    if processes == 1:
        yield lambda function, files, chunk_size: map(function, files)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield pool.imap


def _add_distribution(
    corpus: Corpus,
    recipe: CorpusRecipe,
    distribution: Distribution,
    split: str,
    deduplicator: Deduplicator,
    ngrams: NgramFilter,
    parallel_map: Callable[..., Iterable[_Inspected]],
) -> dict[str, Any]:
    """Read one distribution into the corpus and return its manifest entry."""
    files = list(distribution.files())
    random.Random(f"{recipe.seed}/{distribution.name}").shuffle(files)
    files.sort(key=lambda f: f.is_test)  # own code first; tests fill what their share allows
    dropped: Counter[str] = Counter()
    used: list[dict[str, Any]] = []
    total = tests = 0
    limit = recipe.max_bytes_per_distribution
    for item in parallel_map(_inspect, files, 8):
        size = len(item.text)
        test_limit = limit * recipe.max_test_share if item.file.is_test else limit
        reason = item.reason
        if reason is None and (total + size > limit or (item.file.is_test and tests + size > test_limit)):
            reason = "over the distribution's limit"
        if reason is None and ngrams.matches(item.text):
            reason = "shares an n-gram with HumanEval"
        if reason is None and deduplicator.is_duplicate(item.text):
            reason = "duplicate"
        if reason is not None:
            dropped[reason] += 1
            continue
        total += size
        tests += size if item.file.is_test else 0
        corpus.documents[split].append(item.text)
        if split == "train":
            corpus.chat.extend(item.chat)
        used.append({"path": item.file.path, "sha256": item.file.sha256})
    return {
        "name": distribution.name,
        "version": distribution.version,
        "licence": distribution.licence,
        "split": split,
        "text_bytes": total,
        "dropped": dict(dropped),
        "files": sorted(used, key=lambda f: str(f["path"])),
    }
