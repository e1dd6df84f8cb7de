"""Orders of codes in memory: rows as checkpoints have them, and as the lanes of a GPU's warp take them.

A warp multiplies an eighth of K, its lane eight columns of a row at a time, every fourth eight. ``lanes``: 8
rows together; there an eighth of K after the other; there items of 128 columns of 4 bits or 64 of 8; there 16
bytes of a row for each lane. ``pairs``, 4 bits only: 16 rows together, an item is 64 columns, and a lane's 16
bytes are of a row and of the row eight below. ``bytes``, FP8 only: ``lanes``, but codes are left as they are.

The bits of four bytes lie so that few shifts and masks leave elements 2i and 2i + 1 in the halves of a word:
integers in place e / 2 + (e % 2) * n / 2 of n codes, floats with sign, exponent and mantissa where bfloat16
has them, or a shift away.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch
from torch import Tensor

from lean_laguna.quant.scheme import Kind

Order = Literal["rows", "lanes", "bytes", "pairs"]
WARPS = 8
PIECE_BYTES = 1 << 24
"""Codes reordered at a time: temporary memory stays small beside a bank of experts."""
_FP4 = ((14, 7, 8, 15), (4, 5, 6, 13), (0, 1, 2, 9), (10, 11, 12, 3))
_FP8 = ((4, 5, 6, 7, 8, 9, 10, 15), (0, 1, 2, 3, 12, 13, 14, 11))
"""Bits of each pair's codes in their half of a word, mantissa first; those of ``fp4``'s last pair are in the
other half, but for the sign."""


def bits_of(kind: Kind) -> int:
    """Return the bits of a code."""
    return 4 if kind in ("fp4", "int4") else 8


def kernel_order(kind: Kind, *, pairs: bool) -> Order:
    """Return the order in which the CUDA C++ kernels take codes.

    Args:
        kind: Of the codes.
        pairs: Their product adds to the residual stream.
    """
    if bits_of(kind) == 4:
        return "pairs" if pairs else "lanes"
    return "bytes" if kind == "fp8" and not pairs else "lanes"


def fits(kind: Kind, order: Order, rows: int, columns: int) -> bool:
    """Say whether a weight can be laid out so."""
    is_small = bits_of(kind) == 4
    if order == "bytes" and kind != "fp8":
        return False
    if order == "pairs":
        return is_small and rows % 16 == 0 and columns % 512 == 0
    return order == "rows" or (rows % 8 == 0 and columns % (1024 if is_small else 512) == 0)


def reordered(codes: Tensor, kind: Kind, order: Order) -> Tensor:
    """Return codes [N, B] uint8, in order of rows, in another order; a copy of the same shape."""
    if order == "rows":
        return codes.clone()
    words = _moved(codes.contiguous().view(torch.int32), _places(kind, order))
    rows, width = words.shape
    if order != "pairs":
        groups = 4 if bits_of(kind) == 4 else 2
        parts = words.view(-1, 8, WARPS, width // (WARPS * 16), groups, 4, 4 // groups)
        turned = parts.permute(0, 2, 3, 1, 5, 4, 6)
    else:
        parts = words.view(-1, 2, 8, WARPS, width // (WARPS * 8), 2, 4)
        turned = parts.permute(0, 3, 4, 2, 6, 1, 5)
    return turned.reshape(rows, width).view(torch.uint8)


def restored(codes: Tensor, kind: Kind, order: Order) -> Tensor:
    """Return the codes [N, B] uint8 that ``reordered`` was given."""
    if order == "rows":
        return codes
    words = codes.contiguous().view(torch.int32)
    rows, width = words.shape
    if order != "pairs":
        groups = 4 if bits_of(kind) == 4 else 2
        parts = words.view(-1, WARPS, width // (WARPS * 16), 8, 4, groups, 4 // groups)
        turned = parts.permute(0, 3, 1, 2, 5, 4, 6)
    else:
        parts = words.view(-1, WARPS, width // (WARPS * 8), 8, 4, 2, 2)
        turned = parts.permute(0, 5, 3, 1, 2, 6, 4)
    natural = [0] * 32
    for old, new in enumerate(_places(kind, order)):
        natural[new] = old
    return _moved(turned.reshape(rows, width), tuple(natural)).view(torch.uint8)


@cache
def _places(kind: Kind, order: Order) -> tuple[int, ...]:
    """Return where each bit of four bytes of codes goes."""
    if order == "bytes":
        return tuple(range(32))
    bits = bits_of(kind)
    half = 16 // bits
    places = []
    for element in range(2 * half):
        pair, upper = divmod(element, 2)
        if kind == "fp4":
            own = [place + 16 * upper for place in _FP4[pair]]
            places += own if pair < 3 else [*((place + 16) % 32 for place in own[:3]), own[3]]
        elif kind == "fp8":
            places += [place + 16 * upper for place in _FP8[pair]]
        else:
            places += [(pair + upper * half) * bits + bit for bit in range(bits)]
    return tuple(places)


def _moved(words: Tensor, places: tuple[int, ...]) -> Tensor:
    """Move bit i of every word [int32] to ``places[i]``."""
    masks: dict[int, int] = {}
    for old, new in enumerate(places):
        masks[new - old] = masks.get(new - old, 0) | 1 << new
    out = torch.zeros_like(words)
    for shift, mask in masks.items():
        part = words << shift if shift >= 0 else words >> -shift
        out |= part.bitwise_and_(mask - (1 << 32) if mask >> 31 else mask)
    return out
