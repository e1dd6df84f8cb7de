"""The CPU kernels for one tile of rows with every buffer and view made in advance.

At a few rows an operation costs less than the Python around it, so these run the very operations of
``reference``, to the same bits, into fixed buffers. A result is valid until the same object runs again.

Shapes: R rows of the tile, n of them real; S chunks of the context.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from lean_laguna.kernels.attention_plan import ATTN_CHUNK
from lean_laguna.kernels.elementwise import add_up, scalar
from lean_laguna.kernels.linear import ROW_TILE, agrees, is_batched, is_tiled, linear


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
    """Product of a tile of R rows with one weight [N, K].

    Attributes:
        out: Its buffer, [R, N].
    """

    def __init__(self, weight: torch.Tensor, rows: int, out: torch.Tensor | None = None):
        """Bind the weight, and a buffer that others may share."""
        self._weight, self._transposed = weight, weight.t()
        self._is_plain = is_tiled(weight, rows)
        self.out = torch.empty(rows, weight.shape[0]) if out is None else out

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply [R, K]."""
        if self._is_plain:
            return torch.mm(x, self._transposed, out=self.out)
        return self.out.copy_(linear(x, self._weight))


@dataclass(frozen=True)
class _ChunkViews:
    """Buffers and views for one number of chunks."""

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

    Attributes:
        joint: Buffer of the projections, as given.
        own: By n, keys and values of the tile's first n rows, [n, 2 * J * P].
        own_keys: Keys of the tile's rows, [J, P, R].
        own_values: Values of the tile's rows, [J, R, P].
    """

    def __init__(
        self, joint: torch.Tensor, heads: int, kv_heads: int, head_dim: int, rotary: int, eps: float
    ):
        """Cut views into a layer's projections.

        Args:
            joint: Buffer of the projections q | k | v | gate, [R, N].
            heads: Query heads.
            kv_heads: Key/value heads.
            head_dim: Width of a head.
            rotary: Rotating dimensions.
            eps: Of the norms of queries and keys.
        """
        self.joint, self._num_rows = joint, joint.shape[0]
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.per_kv, num_rows = heads // kv_heads, self._num_rows
        width, half, end = (heads + kv_heads) * head_dim, rotary // 2, (heads + 2 * kv_heads) * head_dim
        self._qk = joint[:, :width].view(num_rows, heads + kv_heads, head_dim)
        self._q, self._k = self._qk[:, :heads], self._qk[:, heads:]
        self._turned = self._qk[..., :rotary]
        self._first, self._second = self._qk[..., :half], self._qk[..., half:rotary]
        self._swapped = torch.empty(num_rows, heads + kv_heads, rotary)
        self._swapped_first, self._swapped_second = self._swapped.split(half, -1)
        own = joint[:, heads * head_dim : end]
        self.own = [own[:rows] for rows in range(num_rows + 1)]
        self.own_keys = self._k.permute(1, 2, 0)
        self.own_values = joint[:, width:end].view(num_rows, kv_heads, head_dim).transpose(0, 1)
        self._gate = joint[:, end:]
        self._norm = TileNorm((num_rows, heads + kv_heads, head_dim), eps)
        self._summed = torch.empty(kv_heads, num_rows * self.per_kv * head_dim)
        self._rows = self._summed.view(kv_heads, num_rows, self.per_kv, head_dim).transpose(0, 1)
        self.out = torch.empty(num_rows, heads * head_dim)
        self._out_rows = self.out.view(num_rows, kv_heads, self.per_kv, head_dim)
        self._scale = scalar(head_dim**-0.5)
        self._chunks: dict[int, _ChunkViews] = {}

    @staticmethod
    def fits(rows: int, heads: int, kv_heads: int, head_dim: int) -> bool:
        """Whether a tile of ``rows`` rows attends with the bits of ``attention.paged_attention``."""
        tall, reference = (count * heads // kv_heads for count in (rows, ROW_TILE))
        keys, values = torch.empty(1, head_dim, ATTN_CHUNK), torch.empty(1, ATTN_CHUNK, head_dim)
        transposed = torch.empty(1, ATTN_CHUNK, head_dim).transpose(1, 2)
        return (
            agrees(tall, reference, head_dim, ATTN_CHUNK)
            and agrees(tall, reference, ATTN_CHUNK, head_dim)
            and is_batched(tall, head_dim, ATTN_CHUNK, keys)
            and is_batched(tall, ATTN_CHUNK, head_dim, values)
            and is_batched(reference, head_dim, ATTN_CHUNK, transposed)
        )

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
            cos: [R or 1, 1, rotating dimensions].
            signed_sin: Both halves of the signed sine, alike.
        """
        self._qk.mul_(self._norm.inverse(self._qk))
        self._q.mul_(q_weight)
        self._k.mul_(k_weight)
        torch.mul(self._second, signed_sin[0], out=self._swapped_first)
        torch.mul(self._first, signed_sin[1], out=self._swapped_second)
        self._turned.mul_(cos).add_(self._swapped)

    def attend(
        self, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, num_chunks: int
    ) -> torch.Tensor:
        """Attend and gate.

        Args:
            keys: [J * S, P, ATTN_CHUNK], the tile's own among them.
            values: [J * S, ATTN_CHUNK, P].
            mask: 0 where a row sees a key and -inf elsewhere, [R, 1, S, ATTN_CHUNK].
            num_chunks: S.

        Returns:
            [R, H * P].
        """
        at = self._chunks.get(num_chunks)
        if at is None:
            # Not under inference mode, whose tensors could not be written to outside it.
            with torch.inference_mode(False):
                at = self._chunks[num_chunks] = self._prepare(num_chunks)
        torch.mul(at.q_spread, self._scale, out=at.queries)
        torch.bmm(at.queries_flat, keys, out=at.scores)
        torch.add(at.scores_grouped, mask, out=at.masked)
        torch.softmax(at.masked_flat, -1, out=at.weights)
        if num_chunks > 1:
            at.chunked.copy_(at.weights_by_chunk)
        torch.bmm(at.chunked_flat, values, out=at.partial)
        add_up(at.partial_by_chunk, self._summed)
        if not self._gate.shape[1]:
            self._out_rows.copy_(self._rows)
            return self.out
        gate = F.softplus(self._gate).view(self._num_rows, self.kv_heads, self.per_kv, -1)
        torch.mul(self._rows, gate, out=self._out_rows)
        return self.out

    def _prepare(self, num_chunks: int) -> _ChunkViews:
        """Make buffers and views for a number of chunks."""
        kv_heads, per_kv, head_dim, num_rows = self.kv_heads, self.per_kv, self.head_dim, self._num_rows
        pairs, tall, keys = kv_heads * num_chunks, num_rows * per_kv, num_chunks * ATTN_CHUNK
        q = self._q.view(num_rows, kv_heads, per_kv, head_dim).transpose(0, 1)
        queries = torch.empty(kv_heads, num_chunks, num_rows, per_kv, head_dim)
        scores = torch.empty(pairs, tall, ATTN_CHUNK)
        masked = torch.empty(kv_heads, num_rows, per_kv, num_chunks, ATTN_CHUNK)
        weights = torch.empty(kv_heads, tall, keys)
        chunked = torch.empty(kv_heads, num_chunks, tall, ATTN_CHUNK) if num_chunks > 1 else weights
        partial = torch.empty(pairs, tall, head_dim)
        grouped = scores.view(kv_heads, num_chunks, num_rows, per_kv, ATTN_CHUNK)
        return _ChunkViews(
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
