"""Orders of codes in memory: rows as checkpoints have them, and as the lanes of a GPU's warp take them.

A lane multiplies eight columns at a time, every fourth eight of a row; in lane order the codes of 16 bytes
are all of one lane. ``lanes``: in each row, blocks of 128 columns of 4 bits or 64 of 8; element e of four
bytes that hold n codes lies at place e / 2 + (e % 2) * n / 2. ``pairs``, 4 bits only: 16 rows together, as
eight warps take eight parts of K; a lane's 16 bytes are 16 columns of a row and of the row eight below.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Order = Literal["rows", "lanes", "pairs"]
WARPS = 8


def fits(bits: int, order: Order, rows: int, columns: int) -> bool:
    """Say whether a weight can be laid out so."""
    if order == "pairs":
        return bits == 4 and rows % 16 == 0 and columns % 512 == 0
    return order == "rows" or columns % (128 if bits == 4 else 64) == 0


def reordered(codes: Tensor, bits: int, order: Order) -> Tensor:
    """Return codes [N, B] uint8, in order of rows, in another order; a copy of the same shape."""
    if order == "rows":
        return codes.clone()
    chunks = _placed(codes, bits)
    if order == "lanes":
        groups = 4 if bits == 4 else 2
        turned: Tensor = chunks.unflatten(1, (-1, groups, 4)).transpose(2, 3)
        return turned.reshape(codes.shape)
    parts = chunks.view(-1, 2, 8, WARPS, chunks.shape[1] // (WARPS * 8), 2, 4, 4)
    return parts.permute(0, 3, 4, 2, 6, 1, 5, 7).reshape(codes.shape)


def restored(codes: Tensor, bits: int, order: Order) -> Tensor:
    """Return what ``reordered`` was given."""
    if order == "rows":
        return codes
    rows, width = codes.shape
    if order == "lanes":
        groups, size = (4, 4) if bits == 4 else (2, 8)
        chunks = codes.view(rows, -1, 4, groups, size).transpose(2, 3).reshape(rows, -1, size)
        return _natural(chunks, bits).reshape(codes.shape)
    parts = codes.view(-1, WARPS, width // (WARPS * 32), 8, 4, 2, 2, 4)
    chunks = parts.permute(0, 5, 3, 1, 2, 6, 4, 7).reshape(rows, -1, 4)
    return _natural(chunks, bits).reshape(codes.shape)


def _placed(codes: Tensor, bits: int) -> Tensor:
    """Return chunks of eight columns [N, K / 8, bytes], their elements in place."""
    words = codes.unflatten(1, (-1, 4))
    if bits == 8:
        placed: Tensor = words[..., [0, 2, 1, 3]].flatten(1).unflatten(1, (-1, 8))
        return placed
    low, high = words & 15, words >> 4
    halves = torch.stack((low, high), 2).unflatten(-1, (2, 2))
    both: Tensor = (halves[..., 0] | halves[..., 1] << 4).flatten(2)
    return both


def _natural(chunks: Tensor, bits: int) -> Tensor:
    if bits == 8:
        natural: Tensor = chunks.unflatten(-1, (2, 4))[..., [0, 2, 1, 3]].flatten(2)
        return natural
    halves = chunks.unflatten(-1, (2, 2))
    nibbles = torch.stack((halves & 15, halves >> 4), -1).flatten(-2)
    both: Tensor = nibbles[..., 0, :] | nibbles[..., 1, :] << 4
    return both
