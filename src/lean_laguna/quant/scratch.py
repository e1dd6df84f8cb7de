"""Memory that one thread's encoding uses again and again: fresh pages would cost more than the arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Scratch:
    """Buffers by purpose; not to be shared between threads."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(self, purpose: str, shape: Sequence[int], like: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a tensor with anything in it, valid until the purpose is asked for again.

        Args:
            purpose: What it is for; what is held at the same time has different purposes.
            shape: Its shape.
            like: A tensor on the same device.
            dtype: Its type.
        """
        size = 1
        for count in shape:
            size *= count
        key = (purpose, dtype, like.device)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[key] = torch.empty(size, dtype=dtype, device=like.device)
        return buffer[:size].view(tuple(shape))
