"""Prompt sets for measuring: two that come with the package, and files of the same form.

Prompts are beginnings of Python files, in our own words, since a base model continues text and does not
follow instructions. They end where a token ends in ordinary source: after a docstring or a statement, before
the line break.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from lean_laguna.core.errors import DataError, nearest
from lean_laguna.core.files import parse_json, sha256_text

BUILT_IN_SETS = ("mixed", "trivial")


@dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
        id: Unique in its set.
        difficulty: ``trivial``, ``easy``, ``medium``, ``hard``, or empty where not graded.
        prompt: The text to continue.
    """

    id: str
    difficulty: str
    prompt: str


@dataclass(frozen=True)
class PromptSet:
    """Prompts measured together.

    Attributes:
        name: ``mixed``, ``trivial`` or the file it came from.
        prompts: In the order in which they are run.
        sha256: Of ids and texts, so that two results can be known to be about the same prompts.
    """

    name: str
    prompts: tuple[Prompt, ...]

    @property
    def sha256(self) -> str:
        """64 hex digits over ids and texts in order."""
        return sha256_text(json.dumps([[p.id, p.prompt] for p in self.prompts], ensure_ascii=False))

    def first(self, count: int | None) -> PromptSet:
        """Return a set of ``count`` prompts spread evenly over this one, easy to hard; None keeps all."""
        if count is None or count >= len(self.prompts):
            return self
        chosen = [self.prompts[i * len(self.prompts) // count] for i in range(count)]
        return PromptSet(self.name, tuple(chosen))


def load_prompts(name: str) -> PromptSet:
    """Return a built-in set by name, or the prompts of a ``.jsonl`` or ``.txt`` file.

    Args:
        name: ``mixed`` (14, easy to hard), ``trivial`` (20), a JSON-lines file with ``prompt`` and optionally
            ``id`` and ``difficulty`` on each line, or any other text file, which is one prompt.

    Raises:
        DataError: There is no such set or file, or a line is not as described.
    """
    if name in BUILT_IN_SETS:
        source = resources.files("lean_laguna.tasks").joinpath("data", f"{name}.jsonl")
        return PromptSet(name, _parse_lines(source.read_text(encoding="utf-8"), f"prompt set {name}"))
    path = Path(name)
    if not path.is_file():
        hint = nearest(name, BUILT_IN_SETS) if len(path.parts) == 1 and not path.suffix else ""
        raise DataError(f"prompts: neither a built-in set nor a file: {name}{hint}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"prompts: cannot read {path} as UTF-8 text: {error}") from None
    if not text.strip():
        raise DataError(f"prompts: {path} is empty")
    if path.suffix == ".jsonl":
        return PromptSet(str(path), _parse_lines(text, str(path)))
    return PromptSet(str(path), (Prompt(path.name, "", text),))


def _parse_lines(text: str, where: str) -> tuple[Prompt, ...]:
    prompts: dict[str, Prompt] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        prompt = _parse_line(line, number, f"{where}, line {number}")
        if prompt.id in prompts:
            raise DataError(f"{where}, line {number}: id {prompt.id!r} is used twice")
        prompts[prompt.id] = prompt
    return tuple(prompts.values())


def _parse_line(line: str, number: int, where: str) -> Prompt:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise DataError(f"{where}: not JSON: {error}") from None
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str) or not row["prompt"]:
        raise DataError(f"{where}: must be an object with a text under 'prompt'")
    return Prompt(str(row.get("id", number)), str(row.get("difficulty", "")), row["prompt"])
