"""How blocks attend in training: to target states before their anchor, and to their own rows.

Three ways to the same numbers, all behind ``DFlashDrafter.forward_dense``'s ``attend``: ``sdpa`` gathers each
block's window of keys, ``flex`` compiles the mask into FlexAttention (a GPU), ``dense`` scores every context
row. Source: training.md 1.4; the window is per query, as servers apply it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

AttentionKind = Literal["dense", "sdpa", "flex"]
_KEY_MULTIPLE = 8  # masked GPU kernels want rows of the mask to begin at such multiples
_FLEX_ROWS = 128  # fewer query rows take FlexAttention's decoding kernel, which has no program for such masks


def context_mask(anchors: Tensor, num_slots: int, length: int, window: int | None) -> Tensor:
    """Return which context positions each block row sees, [B, A * Q, S] bool.

    Row (a, k) sees i < a, and with a window i > a + k - window.
    """
    batch = anchors.shape[0]
    keys = torch.arange(length, device=anchors.device)
    rows = anchors[..., None] + torch.arange(num_slots, device=anchors.device)
    seen = (keys < anchors[..., None, None]).expand(-1, -1, num_slots, -1)
    if window is not None:
        seen = seen & (keys > rows[..., None] - window)
    return seen.reshape(batch, -1, length)


def block_mask(num_slots: int, window: int | None, causal: bool, device: torch.device) -> Tensor:
    """Return which rows of its own block each row sees, [Q, Q] bool."""
    slots = torch.arange(num_slots, device=device)
    distance = slots[:, None] - slots
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        seen = seen & (distance < window) & (distance > -window)
    return seen


@dataclass(frozen=True)
class BlockAttention:
    """The ``attend`` that ``DFlashDrafter.forward_dense`` asks for, over B sequences of S context rows.

    Scores against the context and against the own block are softmaxed together.

    Attributes:
        anchors: [B, A] int64.
        length: S.
        layer_windows: Per draft layer, its window or None.
        layer_causal: Per draft layer, causal inside the block.
        document_ids: [B, S] int64 or None.
        kind: Which way.
    """

    anchors: Tensor
    length: int
    layer_windows: tuple[int | None, ...]
    layer_causal: tuple[bool, ...]
    document_ids: Tensor | None = None
    kind: AttentionKind = "dense"

    def __call__(
        self, layer: int, q: Tensor, context_k: Tensor, context_v: Tensor, block_k: Tensor, block_v: Tensor
    ) -> Tensor:
        """Attend; q [N, Q, H, P], context k, v [B * S, J, P], block k, v [N, Q, J, P] -> [N, Q, H, P]."""
        attend = {"dense": self._dense, "sdpa": self._sdpa, "flex": self._flex}[self.kind]
        return attend(layer, q, context_k, context_v, block_k, block_v)

    def _dense(
        self, layer: int, q: Tensor, context_k: Tensor, context_v: Tensor, block_k: Tensor, block_v: Tensor
    ) -> Tensor:
        num_blocks, slots, heads, size = q.shape
        batch, per_sequence = self.anchors.shape
        kv_heads = context_k.shape[1]
        window = self.layer_windows[layer]
        q = q * size**-0.5
        # b sequence, n block in it, q slot, j kv head, g query heads of one kv head, p size, s context
        # position, t block row
        grouped = q.view(batch, per_sequence, slots, kv_heads, heads // kv_heads, size)
        keys = context_k.view(batch, self.length, kv_heads, size)
        values = context_v.view(batch, self.length, kv_heads, size)
        own_keys = block_k.view(batch, per_sequence, slots, kv_heads, size)
        own_values = block_v.view(batch, per_sequence, slots, kv_heads, size)
        far = torch.einsum("bnqjgp,bsjp->bjgnqs", grouped, keys)
        near = torch.einsum("bnqjgp,bntjp->bjgnqt", grouped, own_keys)
        seen_far = context_mask(self.anchors, slots, self.length, window)
        if self.document_ids is not None:
            own = self.document_ids.gather(1, self.anchors)[..., None, None]
            same = (self.document_ids[:, None, None, :] == own).expand(-1, -1, slots, -1)
            seen_far = seen_far & same.reshape(seen_far.shape)
        seen_far = seen_far.view(batch, 1, 1, per_sequence, slots, self.length)
        seen_near = block_mask(slots, window, self.layer_causal[layer], q.device)
        low = torch.finfo(torch.float32).min
        scores = torch.cat(
            [far.float().masked_fill(~seen_far, low), near.float().masked_fill(~seen_near, low)], dim=-1
        )
        weights = torch.softmax(scores, dim=-1).to(q.dtype)
        far_weights, near_weights = weights[..., : self.length], weights[..., self.length :]
        out = torch.einsum("bjgnqs,bsjp->bnqjgp", far_weights, values) + torch.einsum(
            "bjgnqt,bntjp->bnqjgp", near_weights, own_values
        )
        return out.reshape(num_blocks, slots, heads, size)

    def _sdpa(
        self, layer: int, q: Tensor, context_k: Tensor, context_v: Tensor, block_k: Tensor, block_v: Tensor
    ) -> Tensor:
        num_blocks, slots, heads, _ = q.shape
        groups = heads // context_k.shape[1]
        rows, seen = self._gathered(layer, slots)
        # Summed in float32 on the way back: a context row is read by many blocks.
        far = (part.float().index_select(0, rows).to(q.dtype) for part in (context_k, context_v))
        k, v = (
            torch.cat([part.view(num_blocks, -1, *own.shape[2:]), own], dim=1).transpose(1, 2)
            for part, own in zip(far, (block_k, block_v), strict=True)
        )
        # The query heads of one kv head are rows of one product.
        folded = q.unflatten(2, (-1, groups)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        mask = seen[:, None].repeat(1, 1, groups, 1)
        out = F.scaled_dot_product_attention(folded, k, v, attn_mask=mask)
        unfolded: Tensor = out.unflatten(2, (groups, slots)).permute(0, 3, 1, 2, 4)
        return unfolded.reshape(q.shape)

    def _gathered(self, layer: int, slots: int) -> tuple[Tensor, Tensor]:
        """Return the context rows that blocks read, [N * K], and which keys each row sees, [N, Q, K + Q]."""
        window, causal = self.layer_windows[layer], self.layer_causal[layer]
        device, batch = self.anchors.device, self.anchors.shape[0]
        reach = self.length if window is None else min(self.length, window - 1)
        reach += -(reach + slots) % _KEY_MULTIPLE
        anchors = self.anchors.reshape(-1, 1)  # [N, 1]
        at = anchors - torch.arange(reach, 0, -1, device=device)  # [N, K]
        sequence = torch.arange(batch, device=device).repeat_interleave(self.anchors.shape[1])[:, None]
        inside = at >= 0
        rows = sequence * self.length + at.clamp(min=0)
        if self.document_ids is not None:
            flat = self.document_ids.reshape(-1)
            inside = inside & (flat[rows] == flat[sequence * self.length + anchors])
        seen = inside[:, None, :].expand(-1, slots, -1)
        if window is not None:
            places = anchors + torch.arange(slots, device=device)
            seen = seen & (at[:, None, :] > places[..., None] - window)
        near = block_mask(slots, window, causal, device).expand(len(anchors), -1, -1)
        return rows.reshape(-1), torch.cat([seen, near], dim=-1)

    def _flex(
        self, layer: int, q: Tensor, context_k: Tensor, context_v: Tensor, block_k: Tensor, block_v: Tensor
    ) -> Tensor:
        slots, heads, size = q.shape[1:]
        batch, per_sequence = self.anchors.shape
        if q.is_cuda and per_sequence * slots < _FLEX_ROWS:
            return self._sdpa(layer, q, context_k, context_v, block_k, block_v)

        def lay_out(context: Tensor, own: Tensor) -> Tensor:
            both = (part.reshape(batch, -1, part.shape[-2], size) for part in (context, own))
            return torch.cat(list(both), dim=1).transpose(1, 2)

        attend: Any = _flex_attention(q.is_cuda)
        out: Tensor = attend(
            q.reshape(batch, per_sequence * slots, heads, size).transpose(1, 2),
            lay_out(context_k, block_k),
            lay_out(context_v, block_v),
            block_mask=self._flex_mask(layer, slots),
            enable_gqa=heads != context_k.shape[1],
        )
        return out.transpose(1, 2).reshape(q.shape)

    def _flex_mask(self, layer: int, slots: int) -> Any:
        """Return the layer's block mask; layers that see alike share it."""
        window, causal = self.layer_windows[layer], self.layer_causal[layer]
        kept: dict[Any, Any] = self.__dict__.setdefault("_masks", {})
        if (slots, window, causal) not in kept:
            batch, per_sequence = self.anchors.shape
            rows = per_sequence * slots
            kept[slots, window, causal] = _create_block_mask(self.anchors.is_cuda)(
                self._rule(slots, window, causal), batch, None, rows, self.length + rows, self.anchors.device
            )
        return kept[slots, window, causal]

    def _rule(self, slots: int, window: int | None, causal: bool) -> Callable[..., Tensor]:
        anchors, documents, length = self.anchors, self.document_ids, self.length

        def rule(b: Tensor, h: Tensor, q: Tensor, key: Tensor) -> Tensor:
            block, slot = q // slots, q % slots
            anchor = anchors[b, block]
            far = (key < length) & (key < anchor)
            own = key - length
            near = (key >= length) & (own // slots == block)
            offset = slot - own % slots
            if causal:
                near = near & (offset >= 0)
            if window is not None:
                far = far & (key > anchor + slot - window)
                near = near & (offset < window) & (offset > -window)
            if documents is not None:
                far = far & (documents[b, key.clamp(max=length - 1)] == documents[b, anchor])
            return far | near

        return rule


@functools.cache
def _flex_attention(on_gpu: bool) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False) if on_gpu else flex_attention


@functools.cache
def _create_block_mask(on_gpu: bool) -> Any:
    """Compiled on a GPU: uncompiled it lays out the whole grid of queries and keys."""
    from torch.nn.attention.flex_attention import create_block_mask

    return torch.compile(create_block_mask, dynamic=False) if on_gpu else create_block_mask
