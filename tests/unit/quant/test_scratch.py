"""Buffers that are used again."""

from __future__ import annotations

import torch

from lean_laguna.quant.scratch import Scratch


def test_a_purpose_keeps_its_memory_and_another_has_its_own() -> None:
    scratch, like = Scratch(), torch.empty(0)
    first = scratch.take("a", (4, 8), like, torch.float32)
    assert first.shape == (4, 8)
    assert first.dtype == torch.float32
    again = scratch.take("a", (2, 3), like, torch.float32)
    assert again.data_ptr() == first.data_ptr()
    assert scratch.take("b", (4, 8), like, torch.float32).data_ptr() != first.data_ptr()
    assert scratch.take("a", (4, 8), like, torch.int8).dtype == torch.int8


def test_memory_grows_with_what_is_asked_for() -> None:
    scratch, like = Scratch(), torch.empty(0)
    scratch.take("a", (2,), like, torch.int8)
    assert scratch.take("a", (3, 100), like, torch.int8).fill_(1).sum() == 300
