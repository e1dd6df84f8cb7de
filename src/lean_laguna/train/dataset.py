"""Tokenised text on disk and on the device, and the rows of a training step.

Tokens travel as xz-compressed little-endian uint16: half the size of zlib, and read in seconds.
"""

from __future__ import annotations

import functools
import hashlib
import json
import lzma
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor

from lean_laguna.core.errors import DataError
from lean_laguna.core.files import atomic_write_text, atomic_writer, parse_json
from lean_laguna.train.tokenizer import EOS_ID, chars_per_token, chat_document

# lp/pb 1: the two bytes of a token are told apart; a large dictionary finds repeats across files.
_XZ_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 7, "dict_size": 1 << 27, "lc": 3, "lp": 1, "pb": 1}]
_META_KEYS = ("tokens", "sha256", "vocab_size", "chars_per_token")


def encode_documents(tokenizer: Tokenizer, documents: Sequence[str]) -> npt.NDArray[np.uint16]:
    """Encode texts into one stream in which each document starts with EOS; returns [N] uint16."""
    parts: list[npt.NDArray[np.uint16]] = []
    for start in range(0, len(documents), 512):
        for encoding in tokenizer.encode_batch(
            list(documents[start : start + 512]), add_special_tokens=False
        ):
            parts.append(np.array([EOS_ID, *encoding.ids], np.uint16))
    return np.concatenate(parts) if parts else np.empty(0, np.uint16)


def chat_documents(pairs: Sequence[tuple[str, str]], max_chars: int, seed: int) -> list[str]:
    """Return chat-format documents made of a random choice of pairs, ``max_chars`` characters at most."""
    order = list(range(len(pairs)))
    random.Random(seed).shuffle(order)
    documents: list[str] = []
    total = 0
    for index in order:
        document = chat_document(*pairs[index])
        total += len(document)
        if total > max_chars:
            break
        documents.append(document)
    return documents


def save_tokens(folder: Path, split: str, tokens: npt.NDArray[np.uint16]) -> str:
    """Write ``<split>.u16.xz`` and return the SHA-256 of the uncompressed bytes."""
    data = tokens.astype("<u2").tobytes()
    with (
        atomic_writer(folder / f"{split}.u16.xz") as plain,
        lzma.open(plain, "wb", format=lzma.FORMAT_XZ, filters=_XZ_FILTERS) as file,
    ):
        file.write(data)
    return hashlib.sha256(data).hexdigest()


def load_tokens(folder: Path, split: str) -> Tensor:
    """Read ``<split>.u16.xz`` into a CPU tensor [N] int32.

    Raises:
        DataError: The file is missing, cut short, or not what ``meta.json`` says.
    """
    path = folder / f"{split}.u16.xz"
    try:
        data = lzma.decompress(path.read_bytes())
    except FileNotFoundError:
        raise DataError(f"'{path}' is missing; make it with: lean-laguna train corpus") from None
    except (lzma.LZMAError, EOFError) as error:
        raise DataError(f"'{path}' is damaged: {error}") from None
    expected = load_meta(folder)["sha256"][split]
    if hashlib.sha256(data).hexdigest() != expected:
        raise DataError(f"'{path}' does not match the checksum in meta.json")
    return torch.from_numpy(np.frombuffer(data, "<u2").astype(np.int32))


def save_meta(folder: Path, meta: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Write ``meta.json``: counts, checksums, and the characters of each token id."""
    full = {
        **meta,
        "vocab_size": tokenizer.get_vocab_size(),
        "chars_per_token": chars_per_token(tokenizer).tolist(),
    }
    atomic_write_text(folder / "meta.json", json.dumps(full))


def load_meta(folder: Path) -> dict[str, Any]:
    """Read ``meta.json``.

    Raises:
        DataError: It is missing or damaged.
    """
    try:
        meta = parse_json((folder / "meta.json").read_bytes())
    except FileNotFoundError:
        raise DataError(f"'{folder}' has no meta.json; make it with: lean-laguna train corpus") from None
    except (OSError, ValueError) as error:
        raise DataError(f"'{folder / 'meta.json'}' is damaged: {error}") from None
    lacking = [name for name in _META_KEYS if not isinstance(meta, dict) or name not in meta]
    if lacking:
        raise DataError(
            f"'{folder / 'meta.json'}' lacks '{lacking[0]}'; make it anew with: lean-laguna train corpus"
        )
    return dict(meta)


@dataclass(frozen=True)
class RowSampler:
    """Rows of a token stream: every epoch covers it once, in a new order and at a new offset.

    The rows of a step depend on (seed, step) alone, so a resumed run reads what it would have read.

    Attributes:
        tokens: [N] int32 on the training device.
        seq_len: Predicted tokens per row.
        batch_rows: Rows per step.
        seed: Order and offsets.
    """

    tokens: Tensor
    seq_len: int
    batch_rows: int
    seed: int

    def __post_init__(self) -> None:
        if self.steps_per_epoch < 1:
            raise DataError(
                f"{len(self.tokens):,} tokens are too few for one step of {self.batch_rows} rows "
                f"of {self.seq_len}"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Steps after which every token was seen once."""
        return ((len(self.tokens) - 1) // self.seq_len - 1) // self.batch_rows

    def rows(self, step: int) -> Tensor:
        """Return the rows of a step, [B, seq_len + 1] int64.

        Inputs are all but the last of each row, labels all but the first.
        """
        epoch, index = divmod(step, self.steps_per_epoch)
        shift, order = _epoch_order(self.seed, epoch, self.seq_len, self.steps_per_epoch * self.batch_rows)
        chosen = order[index * self.batch_rows : (index + 1) * self.batch_rows]
        starts = (chosen * self.seq_len + shift).to(self.tokens.device)
        offsets = torch.arange(self.seq_len + 1, device=self.tokens.device)
        return self.tokens[starts[:, None] + offsets].long()


@functools.lru_cache(maxsize=4)
def _epoch_order(seed: int, epoch: int, seq_len: int, num_rows: int) -> tuple[int, Tensor]:
    """Return an epoch's offset and the order of its rows."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    shift = int(torch.randint(seq_len, (1,), generator=generator))
    return shift, torch.randperm(num_rows, generator=generator)


def validation_rows(tokens: Tensor, seq_len: int, max_tokens: int) -> Iterator[Tensor]:
    """Yield consecutive held-out rows [1, seq_len + 1] int64, without overlap of the predicted tokens."""
    count = min((len(tokens) - 1) // seq_len, max(1, max_tokens // seq_len))
    stride = max(1, ((len(tokens) - 1) // seq_len) // count)
    for index in range(count):
        start = index * stride * seq_len
        yield tokens[start : start + seq_len + 1].long()[None]
