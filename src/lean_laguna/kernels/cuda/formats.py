"""Packed weights as the CUDA C++ kernels take them: which fit, their words of scales, factors of their sums.

Codes lie as ``Packed.order`` says, set by whoever loads them; ``packed.cuh`` says how they become numbers.
Integers, and FP8 in products that add to the residual stream, are rounded to bfloat16 as a decoded weight is.
Elsewhere FP8's codes are multiplied as they are, and scales multiply the float32 sums of 128 columns. NVFP4
is exact, its divisor multiplies sums.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lean_laguna.kernels.triton.formats import Packed, Weight
from lean_laguna.kernels.triton.weights import SparseWeights

CODES = {"plain": 0, "fp8": 1, "int8": 2, "fp4": 3, "int4": 4}
_UNIT = 2.0**19
"""What NVFP4's decoded codes are too small by."""
_SMALLEST = 0x6D80
"""The bits of a scale of zero places."""
_FP8_UNIT = 2.0**120
_TALL = 128
_WARPS = 8


def code_of(weight: Weight | None) -> int:
    """Return the number of a weight's format in ``packed.cuh``."""
    return CODES[weight.kind] if isinstance(weight, Packed) else CODES["plain"]


def is_small(weight: Packed) -> bool:
    """Say whether two codes share a byte."""
    return weight.kind in ("fp4", "int4")


def fits(weight: Weight, *, pairs: bool = False) -> bool:
    """Say whether the kernels take a weight; ``pairs``: as a product that adds to the residual stream."""
    if not isinstance(weight, Packed):
        return True
    is_whole = weight.kind == "fp8" and not pairs
    order = "bytes" if is_whole else "pairs" if pairs and is_small(weight) else "lanes"
    if weight.order != order or weight.zeros is not None or weight.columns is not None:
        return False
    columns = weight.shape[-1]
    if weight.kind == "fp4":
        return weight.wide == 16
    wide = 64 if pairs or weight.kind == "int8" else 128
    if weight.wide % wide and weight.wide != columns:
        return False
    if is_whole and columns != 512 and columns % 1024:
        return False  # a warp's items are one, or pairs that share scales
    return weight.scales.dtype == torch.bfloat16


def tall_log(*weights: Weight) -> int:
    """Return log2 of the rows that share scales in every FP8 weight given: 7, or 0."""
    return 7 if all(w.tall == _TALL for w in weights if isinstance(w, Packed) and w.kind == "fp8") else 0


def scale_words(weight: Weight, tall: int, *, pairs: bool = False) -> Tensor | None:
    """Return a weight's scales as words of four bytes in the order of its items, None where it is plain.

    Args:
        weight: For which ``fits`` holds.
        tall: From ``tall_log``.
        pairs: As for ``fits``.
    """
    if not isinstance(weight, Packed):
        return None
    key = f"words {tall}"
    if key not in weight.derived:
        weight.derived[key] = _words(weight, tall, pairs)
    return weight.derived[key]


def _words(weight: Packed, tall: int, pairs: bool) -> Tensor:
    columns = weight.shape[-1]
    scales = weight.scales.reshape(-1, weight.scales.shape[-1])
    if weight.kind == "fp4":
        return _fp4_words(scales, columns, pairs)
    if weight.tall > 1 and not (weight.kind == "fp8" and tall and pairs):
        scales = scales.repeat_interleave(weight.tall, 0)
    wide = 128 if weight.kind == "int4" and not pairs else 64
    starts = torch.arange(0, columns, wide, device=scales.device)
    group = starts // weight.wide if scales.shape[1] > 1 else torch.zeros_like(starts)
    values = scales[:, group]
    if weight.kind == "fp8" and not pairs:  # of eight rows by 128 columns, what their sums are multiplied by
        return values[:, ::2].view(-1, 8, (columns + 127) // 128).mT.flatten().view(torch.int32)
    if weight.kind == "fp8":
        values = values.float() * _FP8_UNIT
    values = values.bfloat16()
    if weight.kind == "int4" and pairs:
        parts = values.view(-1, 2, 8, _WARPS, values.shape[1] // _WARPS).permute(0, 3, 4, 2, 1)
        return parts.flatten().view(torch.int32)
    both = torch.stack((values, values), -1).flatten(1).view(torch.int32)
    if weight.kind == "fp8" and tall:
        return both.flatten()
    return both.view(-1, 8, _WARPS, both.shape[1] // _WARPS).permute(0, 2, 3, 1).flatten()


def _fp4_words(scales: Tensor, columns: int, pairs: bool) -> Tensor:
    """Turn e4m3 bytes [N, K / 16] into bfloat16 as the decoded codes want them, two a word."""
    mantissa, exponent = torch.frexp(scales.view(torch.float8_e4m3fn).float())
    places = ((exponent + 14) * 8 + (mantissa * 16 - 8)).to(torch.int16)
    coded = places * 16 + _SMALLEST
    if pairs:
        parts = coded.view(-1, 2, 8, _WARPS, columns // 512, 2, 2)
        return parts.permute(0, 3, 4, 2, 6, 1, 5).flatten().view(torch.int32)
    parts = coded.view(-1, 8, _WARPS, columns // 1024, 4, 2)
    return parts.permute(0, 2, 3, 1, 5, 4).flatten().view(torch.int32)


def unit_factors(weight: Weight) -> Tensor | None:
    """Return what the sums of each eight rows are multiplied by, None where by nothing."""
    if not isinstance(weight, Packed) or weight.divisors is None:
        return None
    if "units" not in weight.derived:
        weight.derived["units"] = (_UNIT / weight.divisors.flatten()[::8]).contiguous()
    return weight.derived["units"]


def pair_factors(weight: Weight) -> Tensor | None:
    """Return what the sums of gate rows and of up rows are multiplied by, None where by nothing."""
    if not isinstance(weight, Packed) or weight.divisors is None:
        return None
    if "pair" not in weight.derived:
        weight.derived["pair"] = _UNIT / weight.divisors.flatten()[[0, -1]]
    return weight.derived["pair"]


def expert_factors(mlp: SparseWeights) -> Tensor | None:
    """Return what sums are multiplied by: of each expert's gate, up and down, then of the shared one's."""
    up, down, shared, last = mlp.gate_up, mlp.down, mlp.shared_gate_up, mlp.shared_down
    if not isinstance(up, Packed) or up.divisors is None:
        return None
    if "experts" not in up.derived:
        rows = [weight.divisors for weight in (down, shared, last) if isinstance(weight, Packed)]
        assert len(rows) == 3
        assert all(row is not None for row in rows)
        routed = torch.stack((up.divisors[:, 0], up.divisors[:, -1], rows[0][:, 0]), 1).flatten()  # type: ignore[index]
        own = torch.stack((rows[1][0], rows[1][-1], rows[2][0]))  # type: ignore[index]
        up.derived["experts"] = _UNIT / torch.cat([routed, own])
    return up.derived["experts"]
