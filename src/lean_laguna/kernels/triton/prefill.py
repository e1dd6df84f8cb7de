"""Chunked prefill of one sequence on static buffers, on the tensor cores.

A chunk's bits depend on its tokens, on where it starts and on the keys before it, and on nothing else: it
runs alone, in one of a few fixed shapes that its own length picks, and no kernel mixes rows except attention,
which reads the cache. So a prefix taken from a cache gives what computing it would have given, as long as
chunks start at the places ``next_chunk`` says.

Dense products are the library's: one shape, one algorithm, one order of sums. Attention and the experts are
in ``prefill_attention`` and ``prefill_experts``; rows are rounded where the decode kernels round them, except
that an expert's weighted term is rounded to the model's dtype before the sum over a token's experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lean_laguna.core.engine_sizes import MAX_ORDERED_KEYS, ORDERED_SLACK
from lean_laguna.kernels.triton.formats import Packed, Weight, decode
from lean_laguna.kernels.triton.launch import cdiv
from lean_laguna.kernels.triton.prefill_attention import attend_before, attend_chunk
from lean_laguna.kernels.triton.prefill_experts import expert_chunk_down, expert_chunk_up
from lean_laguna.kernels.triton.prefill_keys import lowest_key, order_keys, ready_heads
from lean_laguna.kernels.triton.prefill_rows import add_norm, combine, embed_norm, silu_and_mul
from lean_laguna.kernels.triton.prefill_sort import ExpertSort, sort_by_expert
from lean_laguna.kernels.triton.prefill_tiles import AttentionTile, PrefillTiles
from lean_laguna.kernels.triton.step import Caches
from lean_laguna.kernels.triton.weights import DenseWeights, LayerWeights, SparseWeights, TargetWeights

MIN_ROWS = 256
"""Rows of the smallest shape a chunk runs in; the others are its doublings."""

LIBRARY_FROM = 8192
"""The library takes keys in multiples of so many: few shapes, of which each takes it 50 ms the first time."""


def shape_rows(num_tokens: int, chunk_size: int, min_rows: int = MIN_ROWS) -> int:
    """Return the rows that a chunk of ``num_tokens`` tokens is padded to: a function of its length alone."""
    rows = min(min_rows, chunk_size)
    while rows < num_tokens:
        rows *= 2
    return min(rows, chunk_size)


def next_chunk(position: int, end: int, chunk_size: int, long_chunk_size: int | None = None) -> int:
    """Return how many tokens the chunk that starts at ``position`` takes of a prompt that ends at ``end``.

    Chunks start at multiples of ``chunk_size``; from the first multiple of ``long_chunk_size`` above 0 on, at
    multiples of that, for weights are read once a chunk, however long. Where they lie follows from absolute
    positions only.

    Args:
        position: Where a chunk starts.
        end: Tokens of the prompt.
        chunk_size: Of chunks near the start, which prompts share most.
        long_chunk_size: Of later ones, a multiple of ``chunk_size``; None where all have one size.
    """
    size = chunk_size
    if long_chunk_size is not None and position >= long_chunk_size:
        size = long_chunk_size
    return min(end, (position // size + 1) * size) - position


@dataclass(frozen=True)
class PrefillScratch:
    """Buffers of a chunk; contents mean nothing between runs.

    Attributes:
        rows: C, the most tokens of a chunk.
        input_ids: [C] int32, where a caller may put the chunk's tokens.
        length: [1] int32, tokens of the chunk.
        hidden: [C, D] residual stream.
        normed: [C, D].
        delta: [C, D] what an attention or MLP block adds.
        work: Flat; what lives within one block of a layer.
        keys: Keys and values of one layer in order of position, [S, J, P] each.
        sort: A chunk's rows by expert.
        decoded: Flat; one packed weight at a time, decoded for the library.
    """

    rows: int
    input_ids: Tensor
    length: Tensor
    hidden: Tensor
    normed: Tensor
    delta: Tensor
    work: Tensor
    keys: tuple[Tensor, Tensor]
    sort: ExpertSort
    decoded: Tensor

    @classmethod
    def allocate(
        cls, weights: TargetWeights, rows: int, *, max_model_len: int | None = None, least_width: int = 0
    ) -> PrefillScratch:
        """Return buffers for chunks of up to ``rows`` tokens, a power of two or a multiple of MIN_ROWS.

        Args:
            weights: Of the target.
            rows: C.
            max_model_len: Positions there can be; None takes what the rotary tables hold.
            least_width: Values a row that ``work`` has room for, whatever the layers need.
        """
        device, dtype, D = weights.head.device, weights.head.dtype, weights.head.shape[1]

        def empty(*size: int, of: torch.dtype = dtype) -> Tensor:
            return torch.empty(size, dtype=of, device=device)

        sparse = [layer.mlp for layer in weights.layers if isinstance(layer.mlp, SparseWeights)]
        shapes = [layer.attention.shape for layer in weights.layers]
        longest = min(max_model_len or weights.layers[0].rotary[0].shape[0], MAX_ORDERED_KEYS)
        # Blocks of keys start at multiples of their own size.
        ordered = (
            max(cdiv(longest, rows) * rows, *(rows + s.window for s in shapes)) + ORDERED_SLACK,
            shapes[0].num_kv_heads,
            shapes[0].head_dim,
        )
        widths = [_attention_width(layer) for layer in weights.layers]
        widths += [_mlp_width(layer.mlp) for layer in weights.layers]
        return cls(
            rows=rows,
            input_ids=torch.zeros(rows, dtype=torch.int32, device=device),
            length=torch.zeros(1, dtype=torch.int32, device=device),
            hidden=empty(rows, D),
            normed=empty(rows, D),
            delta=empty(rows, D),
            work=empty(rows * max(*widths, least_width)),
            keys=(empty(*ordered), empty(*ordered)),
            sort=ExpertSort.allocate(
                rows,
                experts=max((m.gate_up.shape[0] for m in sparse), default=1),
                top_k=max((m.top_k for m in sparse), default=1),
                device=device,
            ),
            decoded=empty(max((w.shape[0] * w.shape[1] for w in _packed_linears(weights)), default=0)),
        )


def _packed_linears(weights: TargetWeights) -> list[Packed]:
    """Return the packed weights that the library multiplies; banks of experts have kernels."""
    linears: list[Weight | None] = []
    for layer in weights.layers:
        mlp = layer.mlp
        linears += [layer.attention.qkv, layer.attention.gate, layer.attention.out]
        linears += [mlp.gate_up, mlp.down] if isinstance(mlp, DenseWeights) else []
        linears += [mlp.shared_gate_up, mlp.shared_down] if isinstance(mlp, SparseWeights) else []
    return [weight for weight in linears if isinstance(weight, Packed)]


def _has_library(weight: Weight) -> bool:
    """Say whether cuDNN's attention may be used: where it was measured, and newer."""
    if weight.device.type != "cuda" or weight.dtype == torch.float32:
        return False
    return torch.cuda.get_device_capability(weight.device)[0] >= 9 and torch.backends.cuda.cudnn_sdp_enabled()


def _key(rows: int, input_ids: Tensor, tables: tuple[Tensor, ...]) -> tuple[int, ...]:
    """Return what a captured graph depends on besides contents."""
    return rows, input_ids.data_ptr(), *(table.data_ptr() for table in tables)


def _attention_width(layer: LayerWeights) -> int:
    shape = layer.attention.shape
    return shape.width + shape.num_heads * shape.head_dim


def _mlp_width(mlp: DenseWeights | SparseWeights) -> int:
    if isinstance(mlp, DenseWeights):
        return mlp.gate_up.shape[0] + mlp.down.shape[1]
    wide = mlp.bias.shape[0] + 3 * mlp.shared_down.shape[1]
    return wide + mlp.top_k * (mlp.down.shape[2] + mlp.down.shape[1])


def _split(flat: Tensor, rows: int, *widths: int) -> list[Tensor]:
    """Cut the start of a flat buffer into [rows, width] views, one after another."""
    parts, at = [], 0
    for width in widths:
        parts.append(flat[at : at + rows * width].view(rows, width))
        at += rows * width
    return parts


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
        tiles: By kernel class; None takes those of the device.
        library_from: In full layers, cuDNN takes the keys before a chunk up to the last multiple of so many;
            None where there is none.
    """

    weights: TargetWeights
    caches: Caches
    scratch: PrefillScratch
    tap_layers: tuple[int, ...] = ()
    taps: Tensor | None = None
    tiles: PrefillTiles | None = None
    library_from: int | None = LIBRARY_FROM
    _tiles: PrefillTiles = field(init=False, repr=False)
    _graphs: dict[tuple[int, ...], torch.cuda.CUDAGraph] = field(default_factory=dict, init=False, repr=False)

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

        Pages of the chunk's own positions must be in the block tables, and, of those before, what a row of
        the chunk sees: all of them, or of a sliding layer the last ``window - 1``.

        Args:
            input_ids: [C] int32 on the device, of which the first ``num_tokens`` count; C is at least the
                padded shape, ``shape_rows(num_tokens, scratch.rows)``. ``scratch.input_ids`` will do.
            first_position: Absolute position of the first token, where ``next_chunk`` says a chunk starts.
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
        rows = shape_rows(num_tokens, self.scratch.rows)
        if tables is None:
            tables = tuple(table[slot] for table in self.caches.tables)
        self.scratch.length.fill_(num_tokens)
        graph = None if first_position else self._graphs.get(_key(rows, input_ids, tables))
        if graph is None:
            self._launch(input_ids, first_position, rows, tables)
        else:
            graph.replay()
        normed = self.scratch.normed
        return normed[:num_tokens] if all_rows else normed[num_tokens - 1 : num_tokens]

    def context_buffers(self, num_tokens: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return buffers for the context of the chunk last run, [C, D], [C, D] and [C, width].

        They are the chunk's own, but for what ``run`` has returned.

        Args:
            num_tokens: Tokens of the chunk; C is its padded shape.
            width: At most the ``least_width`` that the scratch was allocated with.
        """
        scratch, rows = self.scratch, shape_rows(num_tokens, self.scratch.rows)
        return scratch.delta[:rows], scratch.hidden[:rows], scratch.work[: rows * width].view(rows, width)

    def capture(self, tables: tuple[Tensor, ...]) -> None:
        """Capture the launches of a prompt's first chunk, one graph a padded shape; they take tens of ms.

        ``run`` replays them where a chunk starts at 0 and is given ``scratch.input_ids`` and these very
        tables: the same kernels, the same bits. Waits for the device; nothing but scratch is written.

        Args:
            tables: As for ``run``; what they hold may change later, not where they are.
        """
        ids, rows = self.scratch.input_ids, 0
        if not ids.is_cuda:
            return
        # No token: kernels are compiled, and leave.
        self.scratch.length.fill_(0)
        while rows < self.scratch.rows:
            rows = shape_rows(rows + 1, self.scratch.rows)
            self._launch(ids, 0, rows, tables)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._launch(ids, 0, rows, tables)
            self._graphs[_key(rows, ids, tables)] = graph

    def _launch(self, input_ids: Tensor, first: int, rows: int, tables: tuple[Tensor, ...]) -> None:
        """Launch a chunk of ``scratch.length`` tokens."""
        layers, eps, n = self.weights.layers, self.weights.eps, self.scratch.length
        hidden, normed = self.scratch.hidden[:rows], self.scratch.normed[:rows]
        embed_norm(input_ids, self.weights.embed, layers[0].attention.input_norm, hidden, normed, n, eps)
        for i, layer in enumerate(layers):
            after = layers[i + 1].attention.input_norm if i + 1 < len(layers) else self.weights.norm
            self._attend(i, layer, tables[i], rows, first)
            tap = None
            if self.taps is not None and i in self.tap_layers:
                tap = self.taps[:, self.tap_layers.index(i)]
            if isinstance(layer.mlp, DenseWeights):
                self._run_dense(layer.mlp, rows, after, tap)
            else:
                self._run_experts(layer.mlp, rows, after, tap)

    def _attend(self, i: int, layer: LayerWeights, table: Tensor, rows: int, first: int) -> None:
        """Add attention to the residual stream; leave it normalised for the MLP."""
        scratch, attention = self.scratch, layer.attention
        shape, eps = attention.shape, self.weights.eps
        qkv, heads = _split(scratch.work, rows, shape.width, shape.num_heads * shape.head_dim)
        normed, delta = scratch.normed[:rows], scratch.delta[:rows]
        self._multiply(normed, attention.qkv, qkv[:, : attention.qkv.shape[0]])
        if attention.gate is not None:
            self._multiply(normed, attention.gate, qkv[:, attention.qkv.shape[0] :])
        norms, cache, n = (attention.q_norm, attention.k_norm), self.caches.layers[i], scratch.length
        ready_heads(qkv, norms, layer.rotary, cache, table, shape, first, n, eps=eps)
        tile, lowest = self._tiles.attention(shape), lowest_key(shape, first)
        keys, begin, past, past_keys = cache, None, None, 0
        if shape.window or first + rows <= scratch.keys[0].shape[0] - ORDERED_SLACK:
            keys, begin = scratch.keys, order_keys(cache, table, scratch.keys, lowest, first, n, rows, tile)
            past_keys = 0 if shape.window else self._library_keys(first, tile)
            if past_keys:
                past = attend_before(qkv, keys, shape, past_keys)
        attend_chunk(
            qkv, heads, keys, table, shape, first, n, tile, begin=begin, past=past, past_keys=past_keys
        )
        self._multiply(heads, attention.out, delta)
        add_norm(scratch.hidden[:rows], delta, layer.mlp.norm, normed, n, eps)

    def _multiply(self, x: Tensor, weight: Weight, out: Tensor) -> None:
        """Write x @ weight^T with the library; a packed weight is decoded whole first, once a chunk."""
        plain = decode(weight, self.scratch.decoded) if isinstance(weight, Packed) else weight
        torch.mm(x, plain.t(), out=out)

    def _library_keys(self, first: int, tile: AttentionTile) -> int:
        """Return how many of the keys before a chunk from position ``first`` on the library takes."""
        if self.library_from is None or self.library_from % tile.keys:
            return 0
        return first // self.library_from * self.library_from

    def _run_dense(self, mlp: DenseWeights, rows: int, after: Tensor, tap: Tensor | None) -> None:
        """Add a dense MLP to the residual stream; leave it normalised for what comes after."""
        scratch = self.scratch
        both, act = _split(scratch.work, rows, mlp.gate_up.shape[0], mlp.down.shape[1])
        normed, delta = scratch.normed[:rows], scratch.delta[:rows]
        self._multiply(normed, mlp.gate_up, both)
        silu_and_mul(both, act, scratch.length)
        self._multiply(act, mlp.down, delta)
        add_norm(scratch.hidden[:rows], delta, after, normed, scratch.length, self.weights.eps, tap=tap)

    def _run_experts(self, mlp: SparseWeights, rows: int, after: Tensor, tap: Tensor | None) -> None:
        """Add the experts to the residual stream; leave it normalised for what comes after."""
        scratch, A = self.scratch, mlp.top_k
        E, D, F = mlp.down.shape
        FS = mlp.shared_down.shape[1]
        both, shared, act, terms = _split(scratch.work, rows, E + 2 * FS, FS, A * F, A * D)
        normed, delta = scratch.normed[:rows], scratch.delta[:rows]
        self._multiply(normed, mlp.router_gate_up, both[:, : mlp.router_gate_up.shape[0]])
        if mlp.shared_gate_up is not None:
            self._multiply(normed, mlp.shared_gate_up, both[:, E:])
        silu_and_mul(both[:, E:], shared, scratch.length)
        self._multiply(shared, mlp.shared_down, delta)
        tile = self._tiles.experts
        sort_by_expert(
            both,
            mlp.bias,
            scratch.sort,
            rows,
            scratch.length,
            tile,
            top_k=A,
            softcap=mlp.softcap,
            norm_topk=mlp.norm_topk,
        )
        num_tiles = cdiv(rows * A, tile.rows) + E
        expert_chunk_up(normed, mlp.gate_up, scratch.sort, act.view(rows * A, F), num_tiles, tile, top_k=A)
        expert_chunk_down(
            act.view(rows * A, F), mlp.down, scratch.sort, terms.view(rows * A, D), num_tiles, tile
        )
        combine(
            scratch.hidden[:rows],
            terms.view(rows, A, D),
            delta,
            after,
            normed,
            scratch.length,
            self.weights.eps,
            scaling=mlp.scaling,
            tap=tap,
        )
