"""Chunked prefill of one sequence on static buffers, on the tensor cores.

A chunk is one or more blocks of rows that start at absolute multiples of their size. What picks an algorithm
by its number of rows, the library's products, takes a block at a time; attention of a block reads the cache
as the block before it left it; and the experts, which take all rows of a chunk because their weights are read
once for them, sum every row in one order. So a token's bits depend on the tokens of its block and on those
before it, and on nothing else: not on how long chunks are, not on neighbours, nor on what a cached prefix has
spared. Nor do its launches follow from where a chunk lies, as long as ``spans`` says so: positions and
lengths are read on the device, so they can be captured.

Attention and the experts are in ``prefill_attention`` and ``prefill_experts``; rows are rounded where the
decode kernels round them, except that an expert's weighted term is rounded to the model's dtype before the
sum over a token's experts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lean_laguna.core.engine_sizes import ORDERED_SLACK
from lean_laguna.kernels.triton.attention import AttentionShape
from lean_laguna.kernels.triton.formats import Packed, Weight
from lean_laguna.kernels.triton.launch import cdiv
from lean_laguna.kernels.triton.layer_cache import LayerCache
from lean_laguna.kernels.triton.prefill_attention import attend_before, attend_chunk
from lean_laguna.kernels.triton.prefill_experts import expert_chunk_down, expert_chunk_up
from lean_laguna.kernels.triton.prefill_images import lay_images
from lean_laguna.kernels.triton.prefill_keys import order_keys, ready_heads
from lean_laguna.kernels.triton.prefill_rows import add_norm, combine, embed_norm, norm_rows, silu_and_mul
from lean_laguna.kernels.triton.prefill_scratch import Block, PrefillScratch, shape_rows, split
from lean_laguna.kernels.triton.prefill_sort import sort_by_expert
from lean_laguna.kernels.triton.prefill_tiles import AttentionTile, PrefillTiles
from lean_laguna.kernels.triton.prefill_words import decode_linear
from lean_laguna.kernels.triton.step import Caches
from lean_laguna.kernels.triton.weights import DenseWeights, LayerWeights, SparseWeights, TargetWeights

LIBRARY_FROM = 4096
"""The library takes keys in multiples of so many: few shapes, each of which takes it time at first."""
FAR = 4096
"""From here on keys are laid in order for short blocks too, in layers without a window."""
PART_ROWS = 2048
"""Rows of a short block times the programs that share the keys before it."""


Tapped = Callable[[int, Tensor, Tensor, tuple[Tensor, Tensor]], None]
"""What takes the residual stream after a tapped layer; see ``PrefillStep.tapped``."""
AttendBlock = Callable[..., None]
"""Attention of whole blocks over images of keys: ``kernels.cuda.prompt_attention.attend_block``."""


def _has_library(weight: Weight) -> bool:
    """Say whether cuDNN's attention may be used: where it was measured, and on newer cards where it runs."""
    if weight.device.type != "cuda" or weight.dtype == torch.float32:
        return False
    major = torch.cuda.get_device_capability(weight.device)[0]
    if major < 9 or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    return major == 9 or _library_runs(weight.device, weight.dtype)


@functools.cache
def _library_runs(device: torch.device, dtype: torch.dtype) -> bool:
    """Try cuDNN's attention on little: not every release has it for every card."""
    q, k = (torch.zeros(1, heads, 128, 128, dtype=dtype, device=device) for heads in (8, 1))
    try:
        torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, k, None, True)
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True


@dataclass
class PrefillStep:
    """Prefill of one chunk of one sequence; owns nothing.

    Launches only: no host sync, so the call returns before the GPU is done, and results are in stream order.
    The chunk's keys and values are in the cache afterwards, laid out as the decode kernels would have, so a
    ``TargetStep`` can go on from them.

    Attributes:
        weights: Of the target.
        caches: Of its layers; ``tables`` rows are what ``run`` reads unless it is given others.
        scratch: Buffers of C = ``scratch.rows`` rows.
        tap_layers: Layers whose residual stream the drafter reads, in the order of ``taps``.
        taps: [C, m, D], written for the chunk's tokens: the raw residual stream after the tapped layers; or
            None.
        tapped: Called after each tapped layer with its index in ``tap_layers``, the residual stream [., D],
            the number of tokens [1] int32, and room: [., D] and [B, D]; or None.
        tiles: By kernel class; None takes those of the device.
        library_from: In full layers, cuDNN takes the keys before a block up to the last multiple of so many;
            None where there is none.
        attend_block: Attends whole blocks whose keys can be laid in order, from queries that are not ready;
            None leaves them to Triton and the library.
    """

    weights: TargetWeights
    caches: Caches
    scratch: PrefillScratch
    tap_layers: tuple[int, ...] = ()
    taps: Tensor | None = None
    tapped: Tapped | None = None
    tiles: PrefillTiles | None = None
    library_from: int | None = LIBRARY_FROM
    attend_block: AttendBlock | None = None
    _tiles: PrefillTiles = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Settle what follows from the device."""
        self._tiles = self.tiles or PrefillTiles.of(self.weights.head.device)
        if not _has_library(self.weights.head):
            self.library_from = None

    def run(
        self,
        input_ids: Tensor,
        first_position: int,
        num_tokens: int,
        slot: int = 0,
        *,
        tables: tuple[Tensor, ...] | None = None,
        all_rows: bool = False,
    ) -> Tensor:
        """Run a chunk: its keys and values appended, taps written.

        Pages must be in the block tables for the positions of each block, and, of those before it, for what
        its rows see: all of them, or of a sliding layer the last ``window - 1``. Blocks may share pages of
        sliding layers, of positions that the later one no longer sees.

        Args:
            input_ids: [C] int32 on the device, of which the first ``num_tokens`` count; C is at least the
                padded shape, ``shape_rows(num_tokens, scratch.block)``. ``scratch.input_ids`` will do.
            first_position: Absolute position of the first token, a multiple of ``scratch.block``.
            num_tokens: Tokens of the chunk, 1 to ``scratch.rows``.
            slot: Row of each of ``caches.tables`` that is this sequence's block table.
            tables: [.] int32 block table of the sequence in each layer's KV group, instead of ``slot``.
            all_rows: Return every token's hidden state, for the log-probabilities of a prompt.

        Returns:
            [1, D] final-normed hidden state of the last token, or [num_tokens, D] of all: views of
            ``scratch.normed``, valid until the next run.
        """
        if not 0 < num_tokens <= self.scratch.rows:
            raise ValueError(f"prefill: num_tokens must be 1 to {self.scratch.rows}, found {num_tokens}")
        if tables is None:
            tables = tuple(table[slot] for table in self.caches.tables)
        self.scratch.note(first_position, num_tokens)
        self.launch(input_ids, first_position, num_tokens, tables)
        return self.found(num_tokens, all_rows=all_rows)

    def found(self, num_tokens: int, *, all_rows: bool) -> Tensor:
        """Return what ``run`` does of the chunk last launched: [num_tokens, D], or the last one's [1, D]."""
        normed = self.scratch.normed
        return normed[:num_tokens] if all_rows else normed[num_tokens - 1 : num_tokens]

    def spans(self, rows: int) -> list[tuple[int, float, int]]:
        """Return where the launches of a chunk are the same: one block's, or with ``attend_block`` several's.

        Args:
            rows: The chunk's padded shape.

        Returns:
            First positions from, and up to, and the one to launch with in between.
        """
        most = self.scratch.keys[0].shape[0] - ORDERED_SLACK - rows
        if not self._is_short(rows) and self.attend_block is not None:
            return [(0, most, most)] if most >= 0 else []
        if not self._is_short(rows):
            last = max(0, min(most, (self.library_from or LIBRARY_FROM) - rows))
            return [(0, last, last)]
        last = self.weights.layers[0].rotary[0].shape[0]
        spans: list[tuple[int, float, int]] = [
            (0, FAR - 1, 0),
            (FAR, most, most),
            (max(FAR, most + 1), math.inf, last),
        ]
        return [span for span in spans if span[0] <= min(span[1], last)]

    def _is_short(self, rows: int) -> bool:
        """Say whether a block is of fewer rows than others: so is a prompt's last one, and no other."""
        return rows < self.scratch.block

    def _orders(self, shape: AttentionShape, rows: int, first: int) -> bool:
        """Say whether a block's attention takes keys laid in order, which costs more where there are few."""
        if first + rows > self.scratch.keys[0].shape[0] - ORDERED_SLACK and not shape.window:
            return False
        return not self._is_short(rows) or (not shape.window and first >= FAR)

    def context_buffers(self, num_tokens: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return buffers for the context of the chunk last run, [C, D], [C, D] and [C, width].

        They are the chunk's own, but for what ``run`` has returned.

        Args:
            num_tokens: Tokens of the chunk; C is its padded shape.
            width: The ``context_width`` that the scratch was allocated with.
        """
        scratch, rows = self.scratch, shape_rows(num_tokens, self.scratch.block)
        kv = scratch.beside_delta(rows)[: rows * width].view(rows, width)
        return scratch.delta(rows), scratch.hidden[:rows], kv

    def launch(self, input_ids: Tensor, first: int, num_tokens: int, tables: tuple[Tensor, ...]) -> None:
        """Launch ``run`` for the chunk that ``scratch.note`` has told, or will have.

        Args:
            input_ids: As for ``run``.
            first: The chunk's first position; of a chunk of one block what ``spans`` says.
            num_tokens: Tokens, or any number that is padded to as many rows.
            tables: As for ``run``.
        """
        scratch, layers, eps = self.scratch, self.weights.layers, self.weights.eps
        rows, blocks = shape_rows(num_tokens, scratch.block), scratch.blocks(num_tokens)
        hidden, normed, n = scratch.hidden[:rows], scratch.normed[:rows], scratch.length
        embed_norm(input_ids, self.weights.embed, layers[0].attention.input_norm, hidden, normed, n, eps)
        for i, layer in enumerate(layers):
            after = layers[i + 1].attention.input_norm if i + 1 < len(layers) else self.weights.norm
            for block in blocks:
                self._attend(i, layer, tables[i], block, first)
            tap = None
            if self.taps is not None and i in self.tap_layers:
                tap = self.taps[:, self.tap_layers.index(i)]
            if isinstance(layer.mlp, DenseWeights):
                for block in blocks:
                    self._run_dense(layer.mlp, block, after, tap if tap is None else tap[block.own])
            else:
                self._run_experts(layer.mlp, blocks, rows, tap)
                norm_rows(hidden, after[None], normed, n, eps)
            if self.tapped is not None and i in self.tap_layers:
                rest = scratch.beside_delta(rows)[: scratch.block * hidden.shape[1]]
                room = scratch.delta(rows), rest.view(-1, hidden.shape[1])
                self.tapped(self.tap_layers.index(i), hidden, n, room)

    def _attend(self, i: int, layer: LayerWeights, table: Tensor, block: Block, chunk_first: int) -> None:
        """Add attention to a block's residual stream; leave it normalised for the MLP."""
        scratch, attention = self.scratch, layer.attention
        shape, eps, n = attention.shape, self.weights.eps, block.length
        qkv, heads = split(scratch.beside_keys(), block.rows, shape.width, shape.num_heads * shape.head_dim)
        normed, delta = scratch.normed[block.own], scratch.delta(block.rows)
        self._multiply(normed, attention.qkv, qkv[:, : attention.qkv.shape[0]])
        if attention.gate is not None:
            self._multiply(normed, attention.gate, qkv[:, attention.qkv.shape[0] :])
        at, cache = chunk_first + block.at, self.caches.layers[i]
        is_ordered = self._orders(shape, block.rows, at)
        is_whole = self.attend_block is not None and is_ordered and not self._is_short(block.rows)
        if is_whole:
            self._attend_images(layer, qkv, heads, cache, table, block, at)
        else:
            self._attend_keys(layer, qkv, heads, cache, table, block, at, is_ordered=is_ordered)
        self._multiply(heads, attention.out, delta)
        add_norm(scratch.hidden[block.own], delta, layer.mlp.norm, normed, n, eps)

    def _attend_images(
        self,
        layer: LayerWeights,
        qkv: Tensor,
        heads: Tensor,
        cache: LayerCache | tuple[Tensor, Tensor],
        table: Tensor,
        block: Block,
        at: int,
    ) -> None:
        """Attend from a whole block at position ``at``; a chunk's later ones add to the images there are."""
        assert self.attend_block is not None
        attention, images = layer.attention, self.scratch.keys
        shape, first, n = attention.shape, block.first, block.length
        is_after = block.at > 0 and not shape.window
        num_keys = block.rows + shape.window if shape.window or is_after else at + block.rows
        own, eps = (cache, table, images, shape, first, n, num_keys), self.weights.eps
        lay_images(qkv, attention.k_norm, layer.rotary, *own, eps=eps, is_after=is_after)
        self.attend_block(qkv, heads, attention.q_norm, layer.rotary, images, shape, first, n, eps=eps)

    def _attend_keys(
        self,
        layer: LayerWeights,
        qkv: Tensor,
        heads: Tensor,
        cache: LayerCache | tuple[Tensor, Tensor],
        table: Tensor,
        block: Block,
        at: int,
        *,
        is_ordered: bool,
    ) -> None:
        """Attend from a block at position ``at`` to keys laid in order, or in their pages."""
        scratch, attention, shape = self.scratch, layer.attention, layer.attention.shape
        tile, first, n = self._tiles.attention(shape), block.first, block.length
        keys, past, past_keys, end = cache, None, 0, at + block.rows
        norms, eps = (attention.q_norm, attention.k_norm), self.weights.eps
        ready_heads(qkv, norms, layer.rotary, cache, table, shape, first, n, eps=eps)
        if is_ordered:
            # What blocks before have left may be images.
            keys, is_after = scratch.keys, block.at > 0 and not shape.window and self.attend_block is None
            num_keys = min(end, block.rows + shape.window + tile.keys) if shape.window or is_after else end
            order_keys(cache, table, keys, shape, first, n, num_keys, tile, is_after=is_after)
            past_keys = 0 if shape.window else self._library_keys(at, block.rows, tile)
            if past_keys:
                past = attend_before(qkv, keys, shape, past_keys)
        own = (qkv, heads, keys, table, shape, first, n, tile)
        parts = self._parts(block.rows, shape)
        attend_chunk(*own, is_ordered=is_ordered, past=past, past_keys=past_keys, parts=parts)

    def _parts(self, rows: int, shape: AttentionShape) -> Tensor | None:
        """Return room for what parts of the keys come to, where a block alone has too few programs."""
        num = PART_ROWS // rows
        if shape.window or num < 2 or not self._is_short(rows):
            return None
        return self.scratch.parts(num, rows, shape)

    def _multiply(self, x: Tensor, weight: Weight, out: Tensor) -> None:
        """Write x @ weight^T with the library; a packed weight is decoded whole first."""
        plain = decode_linear(weight, self.scratch.decoded) if isinstance(weight, Packed) else weight
        torch.mm(x, plain.t(), out=out)

    def _library_keys(self, first: int, rows: int, tile: AttentionTile) -> int:
        """Return how many of the keys before a block from position ``first`` on the library takes."""
        if self.library_from is None or self.library_from % tile.keys or self._is_short(rows):
            return 0
        return first // self.library_from * self.library_from

    def _run_dense(self, mlp: DenseWeights, block: Block, after: Tensor, tap: Tensor | None) -> None:
        """Add a dense MLP to a block's residual stream; leave it normalised for what comes after."""
        scratch = self.scratch
        room = scratch.beside_delta(block.rows)
        both, act = split(room, block.rows, mlp.gate_up.shape[0], mlp.down.shape[1])
        normed, delta = scratch.normed[block.own], scratch.delta(block.rows)
        self._multiply(normed, mlp.gate_up, both)
        silu_and_mul(both, act, block.length)
        self._multiply(act, mlp.down, delta)
        add_norm(scratch.hidden[block.own], delta, after, normed, block.length, self.weights.eps, tap=tap)

    def _run_experts(self, mlp: SparseWeights, blocks: list[Block], rows: int, tap: Tensor | None) -> None:
        """Add the experts to a chunk's residual stream."""
        scratch, A = self.scratch, mlp.top_k
        E, D, F = mlp.down.shape
        FS = mlp.shared_down.shape[1]
        room, n = scratch.beside_delta(rows), scratch.length
        (act,) = split(room, rows, A * F)
        rest = room[rows * A * F :]
        both, shared = split(rest, rows, E + 2 * FS, FS)
        normed, delta = scratch.normed[:rows], scratch.delta(rows)
        for block in blocks:
            own, x = both[block.own], normed[block.own]
            self._multiply(x, mlp.router_gate_up, own[:, : mlp.router_gate_up.shape[0]])
            if mlp.shared_gate_up is not None:
                self._multiply(x, mlp.shared_gate_up, own[:, E:])
        silu_and_mul(both[:, E:], shared, n)
        for block in blocks:
            self._multiply(shared[block.own], mlp.shared_down, delta[block.own])
        tile = self._tiles.bank(mlp.gate_up, mlp.down)
        sort_by_expert(
            both,
            mlp.bias,
            scratch.sort,
            rows,
            n,
            tile,
            top_k=A,
            softcap=mlp.softcap,
            norm_topk=mlp.norm_topk,
        )
        num_tiles = cdiv(rows * A, tile.rows) + E
        expert_chunk_up(normed, mlp.gate_up, scratch.sort, act.view(rows * A, F), num_tiles, tile, top_k=A)
        # As many columns at a time as there is room for, in few different shapes; routing has been read.
        columns = D
        while columns * rows * A > rest.numel():
            columns = cdiv(columns, 2)
        for at in range(0, D, columns):
            own = rest[: rows * A * min(columns, D - at)].view(rows * A, -1)
            expert_chunk_down(act.view(rows * A, F), mlp.down, scratch.sort, own, num_tiles, tile, at)
            combine(scratch.hidden[:rows], own.view(rows, A, -1), delta, n, at, scaling=mlp.scaling, tap=tap)
