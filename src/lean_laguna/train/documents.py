"""Documents to train a drafter on: tokens with a mask, checked, and packed whole into rows of one length.

Files are JSONL with ``input_ids`` and ``loss_mask``, which the speculators package reads, too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lean_laguna.core.errors import DataError
from lean_laguna.core.files import parse_json
from lean_laguna.core.json_fields import is_count, is_finite_number
from lean_laguna.core.types import MAX_SEED

PADDING = -1


@dataclass(frozen=True)
class Document:
    """One document.

    Attributes:
        id: Its name.
        tokens: [N] int32.
        written: [N] bool, what the target wrote.
        temperature: At which; None where it is not known.
        seed: Of the engine's noise, where that alone chose the tokens; else None.
        is_stopped: The target ended the answer by itself, not a limit.
        beyond: [G] int32, what the target would say past the end of such an answer, where it was asked.
    """

    id: str
    tokens: Tensor
    written: Tensor
    temperature: float | None = None
    seed: int | None = None
    is_stopped: bool = False
    beyond: Tensor | None = None


@dataclass(frozen=True)
class Packed:
    """Rows of whole documents.

    Attributes:
        tokens: [M, S] int32.
        written: [M, S] bool.
        document_ids: [M, S] int32, -1 where there is none.
    """

    tokens: Tensor
    written: Tensor
    document_ids: Tensor

    @property
    def sha256(self) -> str:
        """Of everything, so that a cache of features can be known to belong to it."""
        digest = hashlib.sha256()
        for part in (self.tokens, self.written.to(torch.uint8), self.document_ids):
            digest.update(part.contiguous().numpy().tobytes())
        return digest.hexdigest()


def read_documents(
    path: Path, *, vocab_size: int, max_length: int, min_supervised: int, tokenizer_sha256: str | None = None
) -> list[Document]:
    """Read and check a file of documents; those with too little to learn from are left out.

    Args:
        path: JSONL file; where ``PATH.meta.json`` lies beside it, its tokenizer must be the target's.
        vocab_size: V of the target.
        max_length: Longest document that fits a row.
        min_supervised: Fewer written tokens than that are too few.
        tokenizer_sha256: Of the target's ``tokenizer.json``.

    Raises:
        DataError: No such file; a line that is no document; an empty answer, a document that is too long, a
            token outside the vocabulary, another tokenizer; nothing left. Names file, line and document.
    """
    _check_tokenizer(path, tokenizer_sha256)
    try:
        lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"'{path}': cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not any(line.strip() for line in lines):
        raise DataError(f"'{path}' holds no document; write some with: lean-laguna train responses")
    found = []
    for number, line in enumerate(lines, 1):
        where = f"'{path}', line {number}"
        try:
            given = parse_json(line)
        except ValueError as error:
            raise DataError(f"{where}: not JSON: {error}") from None
        document = _document(given, number, where)
        _check(document, where, vocab_size, max_length)
        if int(document.written.sum()) >= min_supervised:
            found.append(document)
    if not found:
        raise DataError(
            f"'{path}': none of its {len(lines)} documents has {min_supervised} written tokens; lower "
            "'min_supervised' in the recipe, or have longer answers written"
        )
    return found


def _check_tokenizer(path: Path, expected: str | None) -> None:
    beside = path.with_name(f"{path.name}.meta.json")
    if expected is None or not beside.is_file():
        return
    try:
        found = parse_json(beside.read_bytes())["tokenizer_sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        raise DataError(f"'{beside}' does not say which tokenizer '{path.name}' was made with") from None
    if found != expected:
        raise DataError(
            f"'{path}' was tokenised with another tokenizer (sha256 {str(found)[:12]}...) than the target's "
            f"({expected[:12]}...); its ids would mean other words"
        )


def _document(given: Any, number: int, where: str) -> Document:
    if not isinstance(given, Mapping) or "input_ids" not in given or "loss_mask" not in given:
        raise DataError(
            f"{where}: a document needs 'input_ids' and 'loss_mask'; "
            "make documents of prompts or answers with: lean-laguna train responses"
        )
    ids, mask = given["input_ids"], given["loss_mask"]
    for name, values in (("input_ids", ids), ("loss_mask", mask)):
        if not isinstance(values, list) or not all(type(v) is int and abs(v) < 1 << 31 for v in values):
            raise DataError(f"{where}: '{name}' must be a list of whole numbers")
    if len(ids) != len(mask):
        raise DataError(f"{where}: {len(ids)} 'input_ids' and {len(mask)} 'loss_mask'")
    seed, temperature = given.get("seed", -1), given.get("temperature", -1)  # -1: not known
    return Document(
        str(given.get("id", number)),
        torch.tensor(ids, dtype=torch.int32),
        torch.tensor(mask, dtype=torch.int32).bool(),
        float(temperature) if is_finite_number(temperature) and temperature >= 0 else None,
        seed if is_count(seed, 0, MAX_SEED) and given.get("is_plain") is True else None,
        given.get("finish_reason") == "stop",
    )


def _check(document: Document, where: str, vocab_size: int, max_length: int) -> None:
    name = f"{where}: document '{document.id}'"
    if not bool(document.written.any()):
        raise DataError(f"{name}: its answer is empty, nothing in it was written by the target")
    if len(document.tokens) > max_length:
        raise DataError(
            f"{name}: {len(document.tokens)} tokens, and a row holds {max_length}; raise 'length' in the "
            "recipe, or have shorter answers written"
        )
    low, high = int(document.tokens.min()), int(document.tokens.max())
    if low < 0 or high >= vocab_size:
        raise DataError(
            f"{name}: token {low if low < 0 else high} is outside the target's vocabulary (0 to "
            f"{vocab_size - 1}); it was made with another tokenizer"
        )


def last_answer(document: Document) -> tuple[int, int]:
    """Return where the last run of written tokens begins and ends; a first token is never part of it."""
    end = int(document.written.nonzero()[-1]) + 1
    unwritten = (~document.written[:end]).nonzero()
    return (int(unwritten[-1]) + 1 if len(unwritten) else 1), end


def pack(documents: Sequence[Document], length: int) -> Packed:
    """Pack whole documents into rows, longest first, each into the first row with room.

    Args:
        documents: None longer than ``length``.
        length: S.
    """
    rows: list[list[Document]] = []
    room: list[int] = []
    order = sorted(range(len(documents)), key=lambda i: (-len(documents[i].tokens), i))
    place = size = 0  # no row before this place has room for this size
    for i in order:
        if len(documents[i].tokens) != size:
            place, size = 0, len(documents[i].tokens)
        while place < len(rows) and room[place] < size:
            place += 1
        if place == len(rows):
            rows.append([])
            room.append(length)
        rows[place].append(documents[i])
        room[place] -= size
    tokens = torch.zeros(len(rows), length, dtype=torch.int32)
    written = torch.zeros(len(rows), length, dtype=torch.bool)
    owners = torch.full((len(rows), length), PADDING, dtype=torch.int32)
    for r, held in enumerate(rows):
        start = 0
        for number, document in enumerate(held):
            part = slice(start, start + len(document.tokens))
            tokens[r, part], written[r, part] = document.tokens, document.written
            owners[r, part] = number
            start = part.stop
    return Packed(tokens, written, owners)
