"""Where a drafter's training reads rows of text and the target's states of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lean_laguna.models.laguna import LagunaForCausalLM
from lean_laguna.train.documents import Packed
from lean_laguna.train.drafter_forward import TargetStates
from lean_laguna.train.features import FeatureCache, compute_features, states_of
from lean_laguna.train.generated import Generated

Capture = Callable[..., TargetStates]


@dataclass(frozen=True)
class TextBatch:
    """Rows of text.

    Attributes:
        tokens: [B, S] int64 on the training device.
        written: [B, S] bool on the CPU, what the target wrote.
        document_ids: [B, S] int64 on the CPU, or None where each row is one document.
    """

    tokens: Tensor
    written: Tensor
    document_ids: Tensor | None


class TextSource(Protocol):
    """Rows of one length; what a step reads depends on the row numbers alone."""

    @property
    def num_rows(self) -> int:
        """How many rows there are."""

    def batch(self, rows: Tensor) -> TextBatch:
        """Return rows [B] int64."""

    def states(
        self,
        rows: Tensor,
        batch: TextBatch,
        target: LagunaForCausalLM,
        layer_ids: tuple[int, ...],
        capture: Capture,
    ) -> TargetStates:
        """Return the target's states of a batch."""


@dataclass(frozen=True)
class GeneratedSource:
    """Sequences that the target wrote, its states computed when they are needed."""

    text: Generated

    @property
    def num_rows(self) -> int:
        """How many sequences there are."""
        return len(self.text.tokens)

    def batch(self, rows: Tensor) -> TextBatch:
        """Return sequences [B] int64."""
        tokens = self.text.tokens[rows.to(self.text.tokens.device)].long()
        return TextBatch(tokens, self.text.written_mask(rows), None)

    def states(
        self,
        rows: Tensor,
        batch: TextBatch,
        target: LagunaForCausalLM,
        layer_ids: tuple[int, ...],
        capture: Capture,
    ) -> TargetStates:
        """Run the target over the batch."""
        states = capture(target, batch.tokens, layer_ids)
        return TargetStates(states.taps.clone(), states.last.clone())


@dataclass(frozen=True)
class PackedSource:
    """Rows of packed documents, the target's states from a cache or computed when they are needed.

    Attributes:
        packed: The rows.
        device: Training device.
        cache: Features on disk, or None.
    """

    packed: Packed
    device: torch.device
    cache: FeatureCache | None = None

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return len(self.packed.tokens)

    def batch(self, rows: Tensor) -> TextBatch:
        """Return rows [B] int64."""
        packed = self.packed
        tokens = packed.tokens[rows].long().to(self.device)
        return TextBatch(tokens, packed.written[rows], packed.document_ids[rows].long())

    def states(
        self,
        rows: Tensor,
        batch: TextBatch,
        target: LagunaForCausalLM,
        layer_ids: tuple[int, ...],
        capture: Capture,
    ) -> TargetStates:
        """Read or compute the features; a row at a time, so that both give the same bits."""
        if self.cache is not None:
            return states_of(self.cache.read(rows, self.device), target)
        assert batch.document_ids is not None
        owners = batch.document_ids.to(self.device)
        features = [
            compute_features(target, batch.tokens[i : i + 1], layer_ids, owners[i : i + 1])
            for i in range(len(rows))
        ]
        return states_of(torch.cat(features), target)
