"""Buffers of a prefilled chunk, and the blocks of rows it is computed in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lean_laguna.core.engine_sizes import MAX_ORDERED_KEYS, ORDERED_SLACK, PREFILL_BLOCK
from lean_laguna.kernels.triton.attention import AttentionShape
from lean_laguna.kernels.triton.formats import Packed, Weight
from lean_laguna.kernels.triton.launch import cdiv
from lean_laguna.kernels.triton.prefill_sort import ExpertSort
from lean_laguna.kernels.triton.weights import DenseWeights, SparseWeights, TargetWeights

MIN_ROWS = 256
"""Rows of the smallest shape that the last block of a prompt is padded to; the others are its doublings."""


@dataclass(frozen=True)
class Block:
    """Rows of a chunk that the library's products take at once.

    Attributes:
        at: First row in the chunk.
        rows: Its padded shape.
        length: [1] int32 on the device, tokens of it.
        first: [1] int32 likewise, position of the first of them.
    """

    at: int
    rows: int
    length: Tensor
    first: Tensor

    @property
    def own(self) -> slice:
        """Its rows among the chunk's."""
        return slice(self.at, self.at + self.rows)


def block_rows(num_tokens: int, block: int) -> int:
    """Return the rows that a block of ``num_tokens`` tokens is padded to: a function of its length alone."""
    rows = min(MIN_ROWS, block)
    while rows < num_tokens:
        rows *= 2
    return min(rows, block)


def shape_rows(num_tokens: int, block: int) -> int:
    """Return the rows of a chunk of ``num_tokens`` tokens: whole blocks, and the padded last one."""
    rest = num_tokens % block
    return num_tokens - rest + (block_rows(rest, block) if rest else 0)


@dataclass(frozen=True)
class PrefillScratch:
    """Buffers of a chunk; contents mean nothing between runs.

    Attributes:
        rows: C, the most tokens of a chunk.
        block: Tokens of a block; C is a multiple of it.
        input_ids: [C] int32, where a caller may put the chunk's tokens.
        numbers: [1 + C / block, 8] int32: tokens of the chunk, and of each block, in column 0, and positions
            of their first ones in column 4: on 16 bytes, for kernels are compiled anew for addresses that
            are not.
        hidden: [C, D] residual stream.
        normed: [C, D].
        room: Flat; what lives within a part of a layer, first of all what that adds: see ``delta``.
        keys: Keys and values of one layer in order of position, [S, J, P] each, in the room, beside what
            attention of a block of rows leaves.
        sort: A chunk's rows by expert.
        decoded: Flat; one packed weight at a time, decoded for the library.
    """

    rows: int
    block: int
    input_ids: Tensor
    numbers: Tensor
    hidden: Tensor
    normed: Tensor
    room: Tensor
    keys: tuple[Tensor, Tensor]
    sort: ExpertSort
    decoded: Tensor

    @classmethod
    def allocate(
        cls, weights: TargetWeights, rows: int, *, block: int = PREFILL_BLOCK, context_width: int = 0
    ) -> PrefillScratch:
        """Return buffers for chunks of up to ``rows`` tokens.

        Args:
            weights: Of the target.
            rows: C.
            block: Tokens of a block, where C is a multiple of so many; else all of a chunk is one block.
            context_width: Values a row that a drafter's context has, for which there is room too.
        """
        device, dtype, D = weights.head.device, weights.head.dtype, weights.head.shape[1]
        block = block if rows % block == 0 else rows

        def empty(*size: int) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        sparse = [layer.mlp for layer in weights.layers if isinstance(layer.mlp, SparseWeights)]
        ordered = _ordered_shape(weights, block)
        num = ordered[0] * ordered[1] * ordered[2]
        attention = block * (D + attention_width(weights)) + 2 * num
        within_block = block * (D + max(dense_width(weights), context_width))
        folding = D * (rows + block) if context_width else 0
        experts = rows * (D + experts_width(weights, rows, block))
        room = empty(max(attention, within_block, experts, folding))
        keys = room[block * D : block * D + 2 * num].view(2, *ordered)
        return cls(
            rows=rows,
            block=block,
            input_ids=torch.zeros(rows, dtype=torch.int32, device=device),
            numbers=torch.zeros(1 + rows // block, 8, dtype=torch.int32, device=device),
            hidden=empty(rows, D),
            normed=empty(rows, D),
            room=room,
            keys=(keys[0], keys[1]),
            sort=ExpertSort.allocate(
                rows,
                experts=max((m.gate_up.shape[0] for m in sparse), default=1),
                top_k=max((m.top_k for m in sparse), default=1),
                device=device,
            ),
            decoded=empty(max((w.shape[0] * w.shape[1] for w in _packed_linears(weights)), default=0)),
        )

    def delta(self, rows: int) -> Tensor:
        """Return room for what a part of a layer adds to so many rows, [rows, D]."""
        D = self.hidden.shape[1]
        return self.room[: rows * D].view(rows, D)

    def beside_delta(self, rows: int) -> Tensor:
        """Return the rest of the room, flat; nothing but ``keys`` is live in it between a layer's parts."""
        return self.room[rows * self.hidden.shape[1] :]

    def beside_keys(self) -> Tensor:
        """Return the rest of the room that attention of a block has, flat."""
        D, num = self.hidden.shape[1], self.keys[0].numel()
        return self.room[self.block * D + 2 * num :]

    def parts(self, num: int, rows: int, shape: AttentionShape) -> Tensor | None:
        """Return room for parts of attention, [num, rows, H, P + 2] float32; None where there is too little.

        It lies where ordered keys do, and behind what attention of so many rows leaves.
        """
        H, P = shape.num_heads, shape.head_dim
        at = 8 * cdiv(self.room.numel() - self.beside_keys().numel() + rows * (shape.width + H * P), 8)
        room = self.room[at : at + (self.room.numel() - at) // 2 * 2].view(torch.float32)
        size = num * rows * H * (P + 2)
        return room[:size].view(num, rows, H, P + 2) if room.numel() >= size else None

    @property
    def length(self) -> Tensor:
        """[1] int32, tokens of the chunk."""
        return self.numbers[0, :1]

    def note(self, first: int, num_tokens: int) -> None:
        """Tell the device where a chunk starts and how long it is."""
        spans = [(first, num_tokens)]
        for at in range(0, self.rows, self.block):
            spans.append((first + at, max(0, min(self.block, num_tokens - at))))
        rows = [[num, 0, 0, 0, position, 0, 0, 0] for position, num in spans]
        host = torch.tensor(rows, dtype=torch.int32, pin_memory=self.numbers.is_cuda)
        self.numbers[: len(rows)].copy_(host, non_blocking=True)

    def blocks(self, num_tokens: int) -> list[Block]:
        """Return the blocks of a chunk; what they hold was, or will be, told by ``note``."""
        return [
            Block(at, block_rows(min(self.block, num_tokens - at), self.block), own[:1], own[4:5])
            for at, own in zip(range(0, num_tokens, self.block), self.numbers[1:], strict=False)
        ]


def split(flat: Tensor, rows: int, *widths: int) -> list[Tensor]:
    """Cut the start of a flat buffer into [rows, width] views, one after another."""
    parts, at = [], 0
    for width in widths:
        parts.append(flat[at : at + rows * width].view(rows, width))
        at += rows * width
    return parts


def attention_width(weights: TargetWeights) -> int:
    """Return the values a row that attention leaves, in the widest layer."""
    shapes = [layer.attention.shape for layer in weights.layers]
    return max(shape.width + shape.num_heads * shape.head_dim for shape in shapes)


def dense_width(weights: TargetWeights) -> int:
    """Return the values a row that dense MLPs leave, in the widest layer."""
    dense = [layer.mlp for layer in weights.layers if isinstance(layer.mlp, DenseWeights)]
    return max((mlp.gate_up.shape[0] + mlp.down.shape[1] for mlp in dense), default=0)


def experts_width(weights: TargetWeights, rows: int, block: int) -> int:
    """Return the values a row that sparse layers leave; the longer a chunk, the fewer columns at a time."""
    widths = [0]
    for mlp in (layer.mlp for layer in weights.layers):
        if isinstance(mlp, SparseWeights):
            routing = mlp.bias.shape[0] + 3 * mlp.shared_down.shape[1]
            terms = mlp.top_k * cdiv(mlp.down.shape[1], cdiv(rows, 2 * block))
            widths.append(mlp.top_k * mlp.down.shape[2] + max(routing, terms))
    return max(widths)


def _ordered_shape(weights: TargetWeights, block: int) -> tuple[int, int, int]:
    shapes = [layer.attention.shape for layer in weights.layers]
    longest = min(weights.layers[0].rotary[0].shape[0], MAX_ORDERED_KEYS)
    # Blocks of keys start at multiples of their own size.
    most = max(cdiv(longest, block) * block, *(block + s.window for s in shapes))
    return most + ORDERED_SLACK, shapes[0].num_kv_heads, shapes[0].head_dim


def _packed_linears(weights: TargetWeights) -> list[Packed]:
    """Return the packed weights that the library multiplies; banks of experts have kernels."""
    linears: list[Weight | None] = []
    for layer in weights.layers:
        mlp = layer.mlp
        linears += [layer.attention.qkv, layer.attention.gate, layer.attention.out]
        linears += [mlp.gate_up, mlp.down] if isinstance(mlp, DenseWeights) else []
        linears += [mlp.shared_gate_up, mlp.shared_down] if isinstance(mlp, SparseWeights) else []
    return [weight for weight in linears if isinstance(weight, Packed)]
