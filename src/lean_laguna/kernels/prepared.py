"""The CPU kernels for one tile of rows with every buffer and view made in advance.

At eight rows an operation costs less than the Python around it, so these run the very operations of
``reference``, to the same bits, into fixed buffers. A result is valid until the same object runs again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from lean_laguna.kernels.attention_plan import ATTN_CHUNK, TileBatch
from lean_laguna.kernels.elementwise import MAX_ELEMENTS, scalar
from lean_laguna.kernels.linear import ROW_TILE, is_batched, is_tiled, linear
from lean_laguna.kernels.moe import FEW_EXPERTS, MAX_BANK


class TileNorm:
    """Root-mean-square norm of a tile over its last dimension."""

    def __init__(self, shape: tuple[int, ...], eps: float):
        self._inverse = torch.empty(*shape[:-1], 1)
        self._share, self._eps = scalar(1.0 / shape[-1]), scalar(eps)
        self._out = torch.empty(shape)

    def inverse(self, x: torch.Tensor) -> torch.Tensor:
        """Return 1 / sqrt(mean(x²) + eps), [..., 1]."""
        inverse = self._inverse
        torch.linalg.vector_norm(x, dim=-1, keepdim=True, out=inverse)
        return inverse.mul_(inverse).mul_(self._share).add_(self._eps).rsqrt_()

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Norm ``x`` and multiply by ``weight``."""
        return torch.mul(x, self.inverse(x), out=self._out).mul_(weight)


class TileLinear:
    """Product of a tile with one weight [N, K]."""

    def __init__(self, weight: torch.Tensor):
        self._weight, self._transposed = weight, weight.t()
        self._is_plain = is_tiled(weight)
        self.out = torch.empty(ROW_TILE, weight.shape[0])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply [ROW_TILE, K]."""
        if self._is_plain:
            return torch.mm(x, self._transposed, out=self.out)
        return self.out.copy_(linear(x, self._weight))


@dataclass(frozen=True)
class _ChunkViews:
    """Buffers and views for one number of chunks."""

    gathered: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    q_spread: torch.Tensor
    queries: torch.Tensor
    queries_flat: torch.Tensor
    scores: torch.Tensor
    scores_grouped: torch.Tensor
    masked: torch.Tensor
    masked_flat: torch.Tensor
    weights: torch.Tensor
    weights_by_chunk: torch.Tensor
    chunked: torch.Tensor
    chunked_flat: torch.Tensor
    partial: torch.Tensor
    partial_by_chunk: torch.Tensor


class TileAttention:
    """Norms, rotation, attention and output gate of one tile of one sequence, for one head count.

    Layers of one shape share it: what is a layer's own comes with each call.
    """

    def __init__(
        self, joint: torch.Tensor, heads: int, kv_heads: int, head_dim: int, rotary: int, eps: float
    ):
        """Cut views into a layer's projections.

        Args:
            joint: Buffer of the projections q | k | v | gate, [ROW_TILE, N].
            heads: Query heads.
            kv_heads: Key/value heads.
            head_dim: Width of a head.
            rotary: Rotating dimensions.
            eps: Of the norms of queries and keys.
        """
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.per_kv = heads // kv_heads
        width, half = (heads + kv_heads) * head_dim, rotary // 2
        self._qk = joint[:, :width].view(ROW_TILE, heads + kv_heads, head_dim)
        self._q, self._k = self._qk[:, :heads], self._qk[:, heads:]
        self._turned = self._qk[..., :rotary]
        self._first, self._second = self._qk[..., :half], self._qk[..., half:rotary]
        self._swapped = torch.empty(ROW_TILE, heads + kv_heads, rotary)
        self._swapped_first, self._swapped_second = self._swapped.split(half, -1)
        own = joint[:, heads * head_dim : width + kv_heads * head_dim]
        self.own = [own[:rows] for rows in range(ROW_TILE + 1)]
        self._gate = joint[:, width + kv_heads * head_dim :]
        self._norm = TileNorm((ROW_TILE, heads + kv_heads, head_dim), eps)
        self._summed = torch.empty(kv_heads, ROW_TILE * self.per_kv * head_dim)
        self._rows = self._summed.view(kv_heads, ROW_TILE, self.per_kv, head_dim).transpose(0, 1)
        self.out = torch.empty(ROW_TILE, heads * head_dim)
        self._out_rows = self.out.view(ROW_TILE, kv_heads, self.per_kv, head_dim)
        self._scale = scalar(head_dim**-0.5)
        self._chunks: dict[int, _ChunkViews] = {}

    def turn(
        self,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        cos: torch.Tensor,
        signed_sin: Sequence[torch.Tensor],
    ) -> None:
        """Norm and rotate queries and keys in place.

        Args:
            q_weight: [P].
            k_weight: [P].
            cos: [ROW_TILE, 1, R].
            signed_sin: Both halves of the signed sine, each [ROW_TILE, 1, R / 2].
        """
        self._qk.mul_(self._norm.inverse(self._qk))
        self._q.mul_(q_weight)
        self._k.mul_(k_weight)
        torch.mul(self._second, signed_sin[0], out=self._swapped_first)
        torch.mul(self._first, signed_sin[1], out=self._swapped_second)
        self._turned.mul_(cos).add_(self._swapped)

    def attend(self, kv_flat: torch.Tensor, batch: TileBatch) -> torch.Tensor:
        """Attend and gate.

        Args:
            kv_flat: The layer's storage as rows [.., P], the tile's own keys and values among them.
            batch: Of this tile.

        Returns:
            [ROW_TILE, H * P].
        """
        at = self._chunks.get(batch.num_chunks)
        if at is None:
            # Not under inference mode, whose tensors could not be written to outside it.
            with torch.inference_mode(False):
                at = self._chunks[batch.num_chunks] = self._prepare(batch.num_chunks)
        torch.index_select(kv_flat, 0, batch.kv_rows, out=at.gathered)
        torch.mul(at.q_spread, self._scale, out=at.queries)
        torch.bmm(at.queries_flat, at.keys, out=at.scores)
        torch.add(at.scores_grouped, batch.mask[0], out=at.masked)
        torch.softmax(at.masked_flat, -1, out=at.weights)
        if batch.num_chunks > 1:
            at.chunked.copy_(at.weights_by_chunk)
        torch.bmm(at.chunked_flat, at.values, out=at.partial)
        torch.sum(at.partial_by_chunk, 1, out=self._summed)
        if not self._gate.shape[1]:
            self._out_rows.copy_(self._rows)
            return self.out
        gate = F.softplus(self._gate).view(ROW_TILE, self.kv_heads, self.per_kv, -1)
        torch.mul(self._rows, gate, out=self._out_rows)
        return self.out

    def _prepare(self, num_chunks: int) -> _ChunkViews:
        """Make buffers and views for a number of chunks."""
        kv_heads, per_kv, head_dim = self.kv_heads, self.per_kv, self.head_dim
        pairs, tall, keys = kv_heads * num_chunks, ROW_TILE * per_kv, num_chunks * ATTN_CHUNK
        gathered = torch.empty(2 * kv_heads * keys, head_dim)
        both = gathered.view(2, pairs, ATTN_CHUNK, head_dim)
        q = self._q.view(ROW_TILE, kv_heads, per_kv, head_dim).transpose(0, 1)
        queries = torch.empty(kv_heads, num_chunks, ROW_TILE, per_kv, head_dim)
        scores = torch.empty(pairs, tall, ATTN_CHUNK)
        masked = torch.empty(kv_heads, ROW_TILE, per_kv, num_chunks, ATTN_CHUNK)
        weights = torch.empty(kv_heads, tall, keys)
        chunked = torch.empty(kv_heads, num_chunks, tall, ATTN_CHUNK) if num_chunks > 1 else weights
        partial = torch.empty(pairs, tall, head_dim)
        grouped = scores.view(kv_heads, num_chunks, ROW_TILE, per_kv, ATTN_CHUNK)
        return _ChunkViews(
            gathered=gathered,
            keys=both[0].transpose(1, 2),
            values=both[1],
            q_spread=q.unsqueeze(1).expand(-1, num_chunks, -1, -1, -1),
            queries=queries,
            queries_flat=queries.view(pairs, tall, head_dim),
            scores=scores,
            scores_grouped=grouped.permute(0, 2, 3, 1, 4),
            masked=masked,
            masked_flat=masked.view(kv_heads, tall, keys),
            weights=weights,
            weights_by_chunk=weights.view(kv_heads, tall, num_chunks, ATTN_CHUNK).transpose(1, 2),
            chunked=chunked,
            chunked_flat=chunked.view(pairs, tall, ATTN_CHUNK),
            partial=partial,
            partial_by_chunk=partial.view(kv_heads, num_chunks, tall * head_dim),
        )


class TileExperts:
    """The routed experts of one layer for one tile."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor):
        """Cut views into a bank.

        Args:
            gate_up: [E, 2F, D], gate first.
            down: [E, D, F].
        """
        experts, double, hidden = gate_up.shape
        width = double // 2
        self._gate_up, self._down = gate_up.transpose(1, 2), down.transpose(1, 2)
        self._gate_up_of, self._down_of = self._gate_up.unbind(0), self._down.unbind(0)
        self._by_expert = torch.zeros(experts, ROW_TILE, 1)
        self._by_row = self._by_expert.squeeze(-1).t()
        self._weight_of = self._by_expert.unbind(0)
        self._joint = torch.empty(experts, ROW_TILE, double)
        self._joint_of = self._joint.unbind(0)
        few = range(min(experts, FEW_EXPERTS) + 1)
        self._gate = [self._joint[:count, :, :width] for count in few]
        self._up = [self._joint[:count, :, width:] for count in few]
        self._whole_gate, self._whole_up = self._joint.split(width, -1)
        self._terms = torch.empty(experts, ROW_TILE, hidden)
        self._terms_of = self._terms.unbind(0)
        self._few_terms = [self._terms[:count] for count in few]
        self._total = torch.empty(ROW_TILE, hidden)

    @staticmethod
    def fits(gate_up: torch.Tensor, down: torch.Tensor, top_k: int) -> bool:
        """Whether a bank [E, 2F, D], [E, D, F] runs prepared here, with the bits of ``reference``."""
        experts, double, hidden = gate_up.shape
        return (
            experts <= MAX_BANK
            and experts * ROW_TILE * double // 2 <= MAX_ELEMENTS
            and top_k <= FEW_EXPERTS
            and is_tiled(gate_up[0])
            and is_tiled(down[0])
            and is_batched(ROW_TILE, hidden, double, gate_up.transpose(1, 2))
            and is_batched(ROW_TILE, double // 2, hidden, down.transpose(1, 2))
        )

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        """Run a tile [ROW_TILE, D] with weights and expert ids [ROW_TILE, A] to [ROW_TILE, D]."""
        self._by_row.zero_().scatter_(1, expert_ids, weights)
        used = sorted(set(expert_ids.flatten().tolist()))
        count = len(used)
        if count > FEW_EXPERTS:
            torch.bmm(x.expand(len(self._joint_of), -1, -1), self._gate_up, out=self._joint)
            hidden = F.silu(self._whole_gate).mul_(self._whole_up).mul_(self._by_expert)
            torch.bmm(hidden, self._down, out=self._terms)
            return torch.sum(self._terms, 0, out=self._total)
        for i, expert in enumerate(used):
            torch.mm(x, self._gate_up_of[expert], out=self._joint_of[i])
        hidden = F.silu(self._gate[count]).mul_(self._up[count])
        for i, (expert, rows) in enumerate(zip(used, hidden.unbind(0), strict=True)):
            torch.mm(rows.mul_(self._weight_of[expert]), self._down_of[expert], out=self._terms_of[i])
        return torch.sum(self._few_terms[count], 0, out=self._total)


class TileRouter:
    """Choice of experts for one tile, without a softcap."""

    def __init__(self, logits: torch.Tensor, bias: torch.Tensor, top_k: int, norm_topk: bool, scaling: float):
        """Bind the buffers.

        Args:
            logits: Buffer of the router's logits, [ROW_TILE, E], rows of a wider one.
            bias: Correction bias, [E] float32.
            top_k: Experts A per token.
            norm_topk: Divide the chosen scores by their sum.
            scaling: Factor on the weights.
        """
        self._logits, self._bias, self._norm_topk, self._scaling = logits, bias, norm_topk, scalar(scaling)
        self._scores, self._biased = torch.empty(2, *logits.shape).unbind(0)
        self._sorted = torch.empty(logits.shape), torch.empty(logits.shape, dtype=torch.int64)
        self._expert_ids = self._sorted[1][:, :top_k]
        self._weights, self._sum = torch.empty(ROW_TILE, top_k), torch.empty(ROW_TILE, 1)

    def __call__(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights and expert ids, [ROW_TILE, A] each, best first."""
        torch.sigmoid(self._logits, out=self._scores)
        torch.add(self._scores, self._bias, out=self._biased)
        torch.sort(self._biased, dim=-1, descending=True, stable=True, out=self._sorted)
        torch.gather(self._scores, 1, self._expert_ids, out=self._weights)
        if self._norm_topk:
            self._weights.div_(torch.sum(self._weights, -1, keepdim=True, out=self._sum))
        return self._weights.mul_(self._scaling), self._expert_ids
