"""The DSpark drafter: DFlash's block, a bias by the previous token, and a guess at each draft's acceptance.

The bias makes a block's slots depend on each other at the price of a walk from slot to slot; the walk itself
is in ``spec``. Only the vanilla Markov head is run.

Source: DSpark (arXiv 2607.05147); DeepSpec modeling/dspark/markov_head.py and common.py.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lean_laguna.core.drafter_config import DFlashConfig
from lean_laguna.core.dspark_config import DSparkHeads
from lean_laguna.models.dflash import DFlashDrafter


class DSparkDrafter(DFlashDrafter):
    """A DFlash network with two heads more.

    Attributes:
        markov_w1: [V, r], a row for each previous token.
        markov_w2: [V', r], from such a row to a bias on the drafter's vocabulary.
        confidence_weight: [1, D] or [1, D + r]; None without the head.
        confidence_bias: [1]; None without the head.
    """

    def __init__(self, config: DFlashConfig):
        super().__init__(config)
        heads = config.dspark
        assert heads is not None
        self.heads = heads
        self.markov_w1 = nn.Parameter(torch.empty(config.vocab_size, heads.markov_rank))
        self.markov_w2 = nn.Parameter(torch.empty(config.draft_vocab_size, heads.markov_rank))
        features = config.hidden_size + (heads.markov_rank if heads.confidence_with_markov else 0)
        has_confidence = heads.has_confidence
        self.confidence_weight = nn.Parameter(torch.empty(1, features)) if has_confidence else None
        self.confidence_bias = nn.Parameter(torch.empty(1)) if has_confidence else None

    def init_weights(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Draw the block's weights as DFlash's; the heads start without effect, so a warm start is exact."""
        super().init_weights(std, generator)
        self.init_heads(generator)

    def init_heads(self, generator: torch.Generator | None = None) -> None:
        """Set the heads: rows of about unit length, no bias on any word, an even guess at acceptance."""
        nn.init.normal_(self.markov_w1, std=self.heads.markov_rank**-0.5, generator=generator)
        nn.init.zeros_(self.markov_w2)
        if self.confidence_weight is not None and self.confidence_bias is not None:
            nn.init.zeros_(self.confidence_weight)
            nn.init.zeros_(self.confidence_bias)

    def set_heads(self, heads: DSparkHeads) -> None:
        """Take over another calibration; the heads' shapes stay."""
        assert (heads.markov_rank, heads.has_confidence) == (
            self.heads.markov_rank,
            self.heads.has_confidence,
        )
        self.heads = heads
        self.config = replace(self.config, dspark=heads)

    def markov_rows(self, previous: Tensor) -> Tensor:
        """Look up the rows of previous tokens, [...] int64 to [..., r]."""
        return F.embedding(previous, self.markov_w1)

    def markov_bias(self, rows: Tensor) -> Tensor:
        """Turn rows [..., r] into a bias on the target's vocabulary, [..., V]."""
        own = F.linear(rows, self.markov_w2)
        if self.d2t is None:
            return own
        words = torch.arange(own.shape[-1], device=own.device) + self.d2t
        bias = own.new_zeros(*own.shape[:-1], self.config.vocab_size)
        return bias.index_copy(-1, words, own)

    def add_bias(self, logits: Tensor, rows: Tensor) -> Tensor:
        """Return logits [R, V] float32 with the bias of rows [R, r] added; for serving."""
        return logits + self.markov_bias(rows).float()

    def confidence_logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Guess the acceptance of each slot's draft, given that all before it were accepted.

        Args:
            hidden: [..., D] after the final norm.
            rows: [..., r] of the tokens before the drafts.

        Returns:
            [...] float32, to be put through a sigmoid.
        """
        assert self.confidence_weight is not None
        assert self.confidence_bias is not None
        features = (
            torch.cat((hidden, rows.to(hidden.dtype)), -1) if self.heads.confidence_with_markov else hidden
        )
        return F.linear(
            features.float(), self.confidence_weight.float(), self.confidence_bias.float()
        ).squeeze(-1)
