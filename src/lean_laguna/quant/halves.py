"""Codes of 4 bits, two a byte, the even column in the low half."""

from __future__ import annotations

import torch
from torch import Tensor


def pack_halves(codes: Tensor) -> Tensor:
    """Return codes [N, K] int8 or int16 of 0 to 15, K even, as bytes [N, K / 2] uint8."""
    # Two codes are one number of twice the width: low half, high half.
    pairs = codes.reshape(-1).view(torch.int32 if codes.dtype == torch.int16 else torch.int16)
    shifted = pairs >> (8 * codes.element_size() - 4)
    return shifted.bitwise_or_(pairs).to(torch.int8).view(torch.uint8).view(codes.shape[0], -1)


def unpack_halves(packed: Tensor) -> Tensor:
    """Return codes [N, 2 * B] uint8 of 0 to 15 of bytes [N, B] uint8."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
