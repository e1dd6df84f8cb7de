"""Router and routed experts for one tile of rows with every buffer and view made in advance.

The operations of ``moe``, to the same bits; see ``prepared``. What sorts and places a handful of numbers runs
in NumPy, on the same memory: it costs a quarter of torch's calls.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from lean_laguna.kernels.elementwise import MAX_ELEMENTS, add_up
from lean_laguna.kernels.linear import is_batched, is_tiled
from lean_laguna.kernels.moe import MAX_BANK

# The whole bank in one product costs as much as this share of it expert by expert, at 8 rows and at 16.
_FEW_SHARE = 0.7


class TileRouter:
    """Choice of experts for one tile of R rows, without a softcap.

    Attributes:
        by_expert: Weight of each expert for each row, 0 where not chosen, [E, R, 1].
    """

    def __init__(self, logits: torch.Tensor, bias: torch.Tensor, top_k: int, norm_topk: bool):
        """Bind the buffers.

        Args:
            logits: Buffer of the router's logits, [R, E], rows of a wider one.
            bias: Correction bias, [E] float32.
            top_k: Experts A per token.
            norm_topk: Divide the chosen scores by their sum.
        """
        rows, experts = logits.shape
        self._logits, self._norm_topk, self._top_k = logits, norm_topk, top_k
        self._scores, self._weights = torch.empty(rows, experts), torch.empty(rows, top_k)
        self._sum = torch.empty(rows, 1)
        self.by_expert = torch.zeros(experts, rows, 1)
        self._bias, self._scores_np = bias.detach().numpy(), self._scores.numpy()
        self._weights_np, self._by_row_np = self._weights.numpy(), self.by_expert.numpy()[..., 0].T
        self._biased = np.empty((rows, experts), dtype=np.float32)
        self._rows = np.arange(rows)[:, None]

    def __call__(self) -> list[int]:
        """Set ``by_expert``; return the experts in use, ascending."""
        torch.sigmoid(self._logits, out=self._scores)
        np.add(self._scores_np, self._bias, out=self._biased)
        np.negative(self._biased, out=self._biased)
        # Stable, so that equal scores go to the lower id.
        chosen = self._biased.argsort(-1, kind="stable")[:, : self._top_k]
        self._weights_np[...] = self._scores_np[self._rows, chosen]
        if self._norm_topk:
            self._weights.div_(torch.sum(self._weights, -1, keepdim=True, out=self._sum))
        self._by_row_np.fill(0)
        self._by_row_np[self._rows, chosen] = self._weights_np
        return sorted({expert for row in chosen.tolist() for expert in row})


class TileExperts:
    """The routed experts of one layer for one tile of R rows."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, by_expert: torch.Tensor):
        """Cut views into a bank.

        Args:
            gate_up: [E, 2F, D], gate first.
            down: [E, D, F].
            by_expert: Buffer of the weights, [E, R, 1].
        """
        experts, double, hidden = gate_up.shape
        width, rows = double // 2, by_expert.shape[1]
        self._gate_up, self._down = gate_up.transpose(1, 2), down.transpose(1, 2)
        self._gate_up_of, self._down_of = self._gate_up.unbind(0), self._down.unbind(0)
        self._by_expert, self._weight_of = by_expert, by_expert.unbind(0)
        self._joint = torch.empty(experts, rows, double)
        self._joint_of = self._joint.unbind(0)
        self._gate = [self._joint[:count, :, :width] for count in range(experts + 1)]
        self._up = [self._joint[:count, :, width:] for count in range(experts + 1)]
        self._terms = torch.empty(experts, rows, hidden)
        self._terms_of = self._terms.unbind(0)
        flat = self._terms.view(1, experts, rows * hidden)
        self._first_terms = [flat[:, :count] for count in range(experts + 1)]
        self._total = torch.empty(rows, hidden)
        self._total_flat = self._total.view(1, -1)
        self._few = max(1, int(experts * _FEW_SHARE))

    @staticmethod
    def fits(gate_up: torch.Tensor, down: torch.Tensor, rows: int) -> bool:
        """Whether a bank [E, 2F, D], [E, D, F] runs prepared on ``rows`` rows, with the bits of ``moe``."""
        experts, double, hidden = gate_up.shape
        return (
            experts <= MAX_BANK
            and experts * rows * double // 2 <= MAX_ELEMENTS
            and is_tiled(gate_up[0], rows)
            and is_tiled(down[0], rows)
            and is_batched(rows, hidden, double, gate_up.transpose(1, 2))
            and is_batched(rows, double // 2, hidden, down.transpose(1, 2))
        )

    def __call__(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        """Run a tile [R, D] through the experts in use, ascending, to [R, D]."""
        count = len(used)
        if count > self._few:
            torch.bmm(x.expand(len(self._joint_of), -1, -1), self._gate_up, out=self._joint)
            hidden = F.silu(self._gate[-1]).mul_(self._up[-1]).mul_(self._by_expert)
            torch.bmm(hidden, self._down, out=self._terms)
            return self._add_up(len(self._terms_of))
        for i, expert in enumerate(used):
            torch.mm(x, self._gate_up_of[expert], out=self._joint_of[i])
        hidden = F.silu(self._gate[count]).mul_(self._up[count])
        for i, (expert, rows) in enumerate(zip(used, hidden.unbind(0), strict=True)):
            torch.mm(rows.mul_(self._weight_of[expert]), self._down_of[expert], out=self._terms_of[i])
        return self._add_up(count)

    def _add_up(self, count: int) -> torch.Tensor:
        add_up(self._first_terms[count], self._total_flat)
        return self._total
