"""A whole decode or verify step of a Laguna target on static buffers: what a CUDA graph captures.

The step runs for however many rows ``Rows.num_rows`` says when it executes, at most ``Launch.cols``; nothing
on the host depends on it. Six to seven kernels a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lean_laguna.kernels.triton.attention import attend
from lean_laguna.kernels.triton.expert_down import expert_down
from lean_laguna.kernels.triton.experts import Routing, expert_gate_up
from lean_laguna.kernels.triton.formats import Weight
from lean_laguna.kernels.triton.head import sample
from lean_laguna.kernels.triton.launch import MAX_ROWS, WIDE, Launch, cdiv
from lean_laguna.kernels.triton.layer_cache import LayerCache
from lean_laguna.kernels.triton.norm import embed, rms_norm
from lean_laguna.kernels.triton.projection import gate_up, project
from lean_laguna.kernels.triton.rows import Rows
from lean_laguna.kernels.triton.tiles import Tiles
from lean_laguna.kernels.triton.weights import (
    AttentionWeights,
    DenseWeights,
    LayerWeights,
    SparseWeights,
    TargetWeights,
)


@dataclass(frozen=True)
class Caches:
    """KV pages of every layer, and the block table of each layer's KV group.

    Attributes:
        layers: Of each layer, keys and values, [num_blocks, kv_block_size, J, P] each; and an FP8 cache's
            scales.
        tables: [R, .] int32 block table of each layer; layers of one group share theirs.
    """

    layers: tuple[LayerCache | tuple[Tensor, Tensor], ...]
    tables: tuple[Tensor, ...]


@dataclass(frozen=True)
class Inputs:
    """What a step reads besides weights and caches; all [MAX_ROWS].

    Attributes:
        input_ids: int32.
        seeds: int64 seed of each row's request.
        temperatures: float32.
        rows: Where the rows stand.
        clock: [1] int64, or None: written with the nanosecond at which a step began; on a GPU only.
    """

    input_ids: Tensor
    seeds: Tensor
    temperatures: Tensor
    rows: Rows
    clock: Tensor | None = None

    @classmethod
    def allocate(cls, device: torch.device | str) -> Inputs:
        """Return zeros: no row, no request."""

        def ints(n: int = MAX_ROWS) -> Tensor:
            return torch.zeros(n, dtype=torch.int32, device=device)

        return cls(
            input_ids=ints(),
            seeds=torch.zeros(MAX_ROWS, dtype=torch.int64, device=device),
            temperatures=torch.zeros(MAX_ROWS, dtype=torch.float32, device=device),
            rows=Rows(ints(1), ints(1), ints(), ints(), ints(), ints()),
        )


@dataclass(frozen=True)
class Scratch:
    """Buffers between the kernels of a step; one set serves target and drafter, which never run at once."""

    hidden: Tensor
    normed: Tensor
    qkv: Tensor
    heads: Tensor
    partial: tuple[Tensor, Tensor]
    scores: Tensor
    act: Tensor
    routing: Routing
    best: tuple[Tensor, Tensor]

    @classmethod
    def allocate(
        cls,
        layers: tuple[LayerWeights, ...],
        head: Weight,
        tiles: Tiles,
        triton_rows: int = WIDE,
        *,
        has_parts: bool = True,
    ) -> Scratch:
        """Return buffers wide enough for every layer given.

        Args:
            layers: Of the target and the drafter.
            head: [V, D].
            tiles: Of the step.
            triton_rows: Rows of a step, at most, whose layers run on Triton's kernels.
            has_parts: Whether parts of attention are summed here; ``with_parts`` adds the room for them.
        """
        device, dtype, D = head.device, head.dtype, head.shape[1]
        shapes = {layer.attention.shape for layer in layers}
        sparse = [layer.mlp for layer in layers if isinstance(layer.mlp, SparseWeights)]
        acts = [
            m.gate_up.shape[0] // 2 for m in (layer.mlp for layer in layers) if isinstance(m, DenseWeights)
        ]
        acts += [m.shared_down.shape[1] for m in sparse]
        experts = max([m.gate_up.shape[0] for m in sparse], default=1)
        top_k = max([m.top_k for m in sparse], default=1)
        width = max([m.down.shape[2] for m in sparse], default=1)
        # The kernels in CUDA C++ lay both out by row: there is room for all rows, too.
        slots = max(min(experts, triton_rows * top_k), 2 * cdiv(MAX_ROWS, WIDE) * top_k)

        def empty(*size: int, of: torch.dtype = dtype) -> Tensor:
            return torch.empty(size, dtype=of, device=device)

        routing = Routing(
            act=empty(slots, triton_rows, width),
            slot_weights=empty(slots, triton_rows, of=torch.float32),
            slot_experts=torch.zeros(slots, dtype=torch.int32, device=device),
            num_slots=torch.zeros(1, dtype=torch.int32, device=device),
            expert_ids=torch.zeros(MAX_ROWS, top_k, dtype=torch.int32, device=device),
        )
        parts = cdiv(head.shape[0], tiles.head.block_n)
        return cls(
            hidden=empty(MAX_ROWS, D),
            normed=empty(MAX_ROWS, D),
            qkv=empty(MAX_ROWS * max(s.width for s in shapes)),
            heads=empty(MAX_ROWS * max(s.num_heads * s.head_dim for s in shapes)),
            partial=_parts(layers if has_parts else (), device, triton_rows),
            scores=empty(MAX_ROWS * experts),
            act=empty(MAX_ROWS * max(acts)),
            routing=routing,
            best=(empty(parts, MAX_ROWS, of=torch.float32), empty(parts, MAX_ROWS, of=torch.int32)),
        )

    def with_parts(self, layers: tuple[LayerWeights, ...]) -> Scratch:
        """Return the same buffers with room for parts of attention."""
        return replace(self, partial=_parts(layers, self.hidden.device))


def _parts(
    layers: tuple[LayerWeights, ...], device: torch.device, most_rows: int = WIDE
) -> tuple[Tensor, Tensor]:
    """Return room for the sums of attention's parts, and for their peaks and totals."""
    shapes = {(layer.attention.shape, layer.rotary[0].shape[0]) for layer in layers}
    rows = {(most_rows * s.num_heads * s.num_splits(n), s.head_dim) for s, n in shapes}
    sums = max((num * head_dim for num, head_dim in rows), default=0)
    stats = max((num * 2 for num, _ in rows), default=0)
    return torch.empty(sums, device=device), torch.empty(stats, device=device)


def rows_of(flat: Tensor, width: int) -> Tensor:
    """View the start of a flat buffer as [MAX_ROWS, width]."""
    return flat[: MAX_ROWS * width].view(MAX_ROWS, width)


def run_layer(
    layer: LayerWeights,
    cache: LayerCache | tuple[Tensor, Tensor],
    table: Tensor,
    inputs: Inputs,
    scratch: Scratch,
    tiles: Tiles,
    launch: Launch,
    *,
    eps: float,
    tap: Tensor | None = None,
) -> None:
    """Run one decoder layer on ``scratch.hidden``, in place.

    Args:
        layer: Weights.
        cache: Keys and values of this layer.
        table: Block table of its KV group.
        inputs: Rows of the step.
        scratch: Buffers.
        tiles: Of the step.
        launch: What the launches of a step share.
        eps: RMSNorm epsilon.
        tap: [MAX_ROWS, D], written with the residual stream after this layer, or None.
    """
    attention, mlp, rows = layer.attention, layer.mlp, inputs.rows
    shape = attention.shape
    qkv, heads = rows_of(scratch.qkv, shape.width), rows_of(scratch.heads, shape.num_heads * shape.head_dim)
    n, hidden = rows.num_rows, scratch.hidden
    project_qkv(attention, hidden, qkv, n, tiles, launch, eps)
    norms = (attention.q_norm, attention.k_norm)
    attend(qkv, heads, norms, layer.rotary, cache, table, rows, scratch.partial, shape, launch, eps=eps)
    project(heads, attention.out, hidden, n, tiles.out, launch, residual=hidden)
    if isinstance(mlp, DenseWeights):
        act = rows_of(scratch.act, mlp.down.shape[1])
        gate_up(hidden, mlp.norm, mlp.gate_up, act, n, eps, tiles.dense_gate_up, launch)
        project(act, mlp.down, hidden, n, tiles.dense_down, launch, residual=hidden, tap=tap)
        return
    run_experts(mlp, n, scratch, tiles, launch, eps, tap)


def project_qkv(
    attention: AttentionWeights,
    hidden: Tensor,
    qkv: Tensor,
    n: Tensor,
    tiles: Tiles,
    launch: Launch,
    eps: float,
) -> None:
    """Normalise ``hidden`` and project it to queries, keys, values and gates."""
    norm, width = attention.input_norm, attention.qkv.shape[0]
    project(hidden, attention.qkv, qkv, n, tiles.qkv, launch, norm=norm, eps=eps)
    if attention.gate is not None:
        project(hidden, attention.gate, qkv[:, width:], n, tiles.qkv, launch, norm=norm, eps=eps)


def run_experts(
    mlp: SparseWeights,
    n: Tensor,
    scratch: Scratch,
    tiles: Tiles,
    launch: Launch,
    eps: float,
    tap: Tensor | None,
) -> None:
    """Run a mixture of experts with its router and shared expert on ``scratch.hidden``, in place."""
    hidden = scratch.hidden
    act, scores = rows_of(scratch.act, mlp.shared_down.shape[1]), rows_of(scratch.scores, mlp.bias.shape[0])
    gate_up(
        hidden,
        mlp.norm,
        mlp.router_gate_up,
        act,
        n,
        eps,
        tiles.router,
        launch,
        scores=scores,
        normed=scratch.normed,
        shared=mlp.shared_gate_up,
    )
    expert_gate_up(
        scratch.normed,
        scores,
        mlp.bias,
        mlp.gate_up,
        scratch.routing,
        n,
        tiles.expert_gate_up,
        launch,
        top_k=mlp.top_k,
        softcap=mlp.softcap,
        norm_topk=mlp.norm_topk,
    )
    expert_down(
        scratch.routing,
        mlp.down,
        hidden,
        n,
        tiles.expert_down,
        launch,
        scaling=mlp.scaling,
        shared_act=act,
        shared_weight=mlp.shared_down,
        tap=tap,
    )


LayerRunner = Callable[..., None]
"""Called as ``run_layer`` is."""
HeadRunner = Callable[[Tensor, Tensor, Launch], Tensor]
"""Takes rows after the final norm, the number of live ones and the launch; returns the head's product."""


@dataclass
class TargetStep:
    """One step of the target; owns nothing, so that graphs of several widths share all buffers.

    Attributes:
        weights: Of the target.
        caches: Of its layers.
        inputs: Rows of the step.
        scratch: Buffers.
        sampled: [MAX_ROWS] int32, written: the target's token after each row.
        tap_layers: Layers whose residual stream the drafter reads, in the order of ``taps``.
        taps: [MAX_ROWS, m, D], written, or None.
        logits: [MAX_ROWS, V] float32, written, or None.
        launch: Columns, early launch, programs.
        tiles: By kernel class.
        layer: Runs one layer: ``run_layer``, or what stands in for it.
        head: Multiplies by the head, or None: Triton's kernel does, which chooses too.
    """

    weights: TargetWeights
    caches: Caches
    inputs: Inputs
    scratch: Scratch
    sampled: Tensor
    tap_layers: tuple[int, ...] = ()
    taps: Tensor | None = None
    logits: Tensor | None = None
    launch: Launch = field(default_factory=Launch)
    tiles: Tiles = field(default_factory=Tiles)
    layer: LayerRunner = run_layer
    head: HeadRunner | None = None

    def run(self) -> None:
        """Launch the step: input ids to sampled tokens, K/V appended, taps written."""
        self.fill()
        self.choose()

    def fill(self) -> None:
        """Launch all but the head: input ids to ``scratch.normed``, K/V appended, taps written."""
        weights, inputs, scratch, launch = self.weights, self.inputs, self.scratch, self.launch
        rows = inputs.rows
        embed(inputs.input_ids, weights.embed, scratch.hidden, rows.num_rows, launch, clock=inputs.clock)
        for i, layer in enumerate(weights.layers):
            tap = None
            if self.taps is not None and i in self.tap_layers:
                tap = self.taps[:, self.tap_layers.index(i)]
            self.layer(
                layer,
                self.caches.layers[i],
                self.caches.tables[i],
                inputs,
                scratch,
                self.tiles,
                launch,
                eps=weights.eps,
                tap=tap,
            )
        rms_norm(scratch.hidden, weights.norm, scratch.normed, rows.num_rows, weights.eps, launch)

    def choose(self) -> None:
        """Launch the step's last part alone: from ``scratch.normed``, after the final norm, to tokens."""
        weights, inputs, scratch, launch = self.weights, self.inputs, self.scratch, self.launch
        rows = inputs.rows
        sample(
            scratch.normed,
            weights.head,
            self.sampled,
            inputs.seeds,
            inputs.temperatures,
            rows.positions,
            rows.num_rows,
            scratch.best,
            self.tiles.head,
            launch,
            position_offset=1,
            logits=self.logits,
            given=None if self.head is None else self.head(scratch.normed, rows.num_rows, launch),
        )
