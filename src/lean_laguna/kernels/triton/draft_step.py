"""A drafter's step on static buffers: context from verified rows, then drafts for the next rows.

The block's keys are written to the cache at their positions, where the next step's context overwrites them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lean_laguna.kernels.triton.context import append_context
from lean_laguna.kernels.triton.filters import Filters, choose_filtered
from lean_laguna.kernels.triton.formats import Weight
from lean_laguna.kernels.triton.head import sample, write_logits
from lean_laguna.kernels.triton.launch import MAX_ROWS, Launch
from lean_laguna.kernels.triton.norm import embed, rms_norm
from lean_laguna.kernels.triton.projection import project
from lean_laguna.kernels.triton.step import HeadRunner, Inputs, LayerRunner, Scratch, run_layer
from lean_laguna.kernels.triton.tiles import Tiles
from lean_laguna.kernels.triton.walk import Chances, Walk, finish_walk, start_walk, walk_on
from lean_laguna.kernels.triton.weights import DrafterWeights


@dataclass
class DraftStep:
    """One round of the drafter; owns nothing but ``Features``' buffers.

    Attributes:
        weights: Of the drafter.
        embed: [V, D] the target's.
        head: [V, D] the target's, or the drafter's own reduced one.
        cache: Keys and values of all layers, [L, num_blocks, kv_block_size, J, P] each.
        table: [MAX_ROWS, .] int32 block table of the drafter's KV group.
        inputs: Rows, shared with the target: first the verified ones, then the next step's.
        scratch: Buffers, shared with the target.
        features: Buffers of the context.
        token_map: [V] int what to add to a reduced vocabulary's ids, or None.
        logits: [MAX_ROWS, V] float32, written by ``propose`` unless it walks, or None.
        walk: Of a DSpark drafter, or None.
        chances: Of its drafts, or None where it says none.
        filters: What a walk's drafts are filtered by, or None.
        launch: Columns, early launch, programs.
        tiles: By kernel class.
        layer: Runs one layer: ``run_layer``, or what stands in for it.
        multiply: Multiplies by the head, or None: Triton's kernel does.
    """

    weights: DrafterWeights
    embed: Tensor
    head: Weight
    cache: tuple[Tensor, Tensor]
    table: Tensor
    inputs: Inputs
    scratch: Scratch
    features: Features
    token_map: Tensor | None = None
    logits: Tensor | None = None
    walk: Walk | None = None
    chances: Chances | None = None
    filters: Filters | None = None
    launch: Launch = field(default_factory=Launch)
    tiles: Tiles = field(default_factory=Tiles)
    layer: LayerRunner = run_layer
    multiply: HeadRunner | None = None

    def append_context(self, taps: Tensor) -> None:
        """Write context keys and values of the rows just verified; rejected ones are overwritten later.

        Args:
            taps: [MAX_ROWS, m, D] from the target's step.
        """
        weights, launch, features, tiles = self.weights, self.launch, self.features, self.tiles
        n, flat = self.inputs.rows.num_rows, taps.flatten(1)
        if weights.aux_norms is not None:
            rms_norm(taps, weights.aux_norms, features.taps, n, weights.eps, launch)
            flat = features.taps.flatten(1)
        project(flat, weights.fc, features.joined, n, tiles.context, launch)
        rms_norm(features.joined, weights.hidden_norm, features.normed, n, weights.eps, launch)
        project(
            features.normed,
            weights.context_kv,
            features.kv,
            n,
            tiles.context,
            launch,
            norm=weights.context_norms,
            eps=weights.eps,
        )
        first = weights.layers[0]
        append_context(
            features.kv,
            weights.k_norms,
            first.rotary,
            self.cache,
            self.table,
            self.inputs.rows,
            first.attention.shape,
            launch,
            eps=weights.eps,
        )

    def propose(self) -> None:
        """Fill every row of ``inputs.input_ids`` but each request's first with a draft token."""
        weights, inputs, scratch, launch = self.weights, self._block(), self.scratch, self.launch
        rows = inputs.rows
        embed(inputs.input_ids, self.embed, scratch.hidden, rows.num_rows, launch)
        for i, layer in enumerate(weights.layers):
            cache = (self.cache[0][i], self.cache[1][i])
            self.layer(layer, cache, self.table, inputs, scratch, self.tiles, launch, eps=weights.eps)
        rms_norm(scratch.hidden, weights.norm, scratch.normed, rows.num_rows, weights.eps, launch)
        if weights.spark is not None:
            self._walk()
            return
        sample(
            scratch.normed,
            self.head,
            inputs.input_ids,
            inputs.seeds,
            inputs.temperatures,
            rows.positions,
            rows.num_rows,
            scratch.best,
            self.tiles.head,
            launch,
            position_offset=0,
            logits=self.logits,
            draft_rows=(rows.row_start, rows.row_request),
            token_map=self.token_map,
            given=self._given(),
        )

    def _given(self) -> Tensor | None:
        """Return the product with the head, where another kernel than Triton's makes it."""
        if self.multiply is None:
            return None
        return self.multiply(self.scratch.normed, self.inputs.rows.num_rows, self.launch)

    def _block(self) -> Inputs:
        """Return the rows of the block: without each request's last where it predicts nothing.

        A causal block need not leave that row out: no other sees it.
        """
        weights, rows, features = self.weights, self.inputs.rows, self.features
        if weights.spark is None or not weights.spark.is_shifted or weights.layers[0].attention.shape.causal:
            return self.inputs
        torch.sub(rows.row_count, 1, out=features.row_count).clamp_(min=0)
        return replace(self.inputs, rows=replace(rows, row_count=features.row_count))

    def _walk(self) -> None:
        """Find draft after draft from the block's logits."""
        spark, walk, inputs, launch = self.weights.spark, self.walk, self.inputs, self.launch
        assert spark is not None
        assert walk is not None
        hidden, rows = self.scratch.normed, inputs.rows
        start_walk(spark, walk, rows, launch, hidden=hidden, chances=self.chances)
        logits, tile = walk.logits, self.tiles.head
        write_logits(hidden, self.head, logits, rows.num_rows, tile, launch, given=self._given())
        for step in range(1, min(spark.max_drafts, launch.cols - 1) + 1):
            walk_on(
                step,
                spark,
                walk,
                inputs.input_ids,
                inputs.seeds,
                inputs.temperatures,
                rows,
                launch,
                chances=self.chances,
                token_map=self.token_map,
                keeps_logits=self.filters is not None,
            )
            if self.filters is not None:
                choose_filtered(
                    walk.logits,
                    inputs.input_ids,
                    self.filters,
                    inputs.seeds,
                    inputs.temperatures,
                    rows,
                    launch,
                    position_offset=0,
                    is_draft=True,
                    words=walk.words,
                    is_shifted=spark.is_shifted,
                )
        finish_walk(walk, inputs.input_ids, rows, launch, token_map=self.token_map)


@dataclass(frozen=True)
class Features:
    """Buffers of the context: taps [MAX_ROWS, m, D], joined and normed [MAX_ROWS, D], kv of all layers.

    ``row_count`` [MAX_ROWS] int32 is a block's that is a row shorter than its drafts and anchor.
    """

    taps: Tensor
    joined: Tensor
    normed: Tensor
    kv: Tensor
    row_count: Tensor

    @classmethod
    def allocate(cls, weights: DrafterWeights) -> Features:
        """Return buffers for this drafter."""
        D, width = weights.fc.shape

        def empty(*size: int) -> Tensor:
            return torch.empty(size, dtype=weights.fc.dtype, device=weights.fc.device)

        return cls(
            taps=empty(MAX_ROWS, width // D, D),
            joined=empty(MAX_ROWS, D),
            normed=empty(MAX_ROWS, D),
            kv=empty(MAX_ROWS, weights.context_kv.shape[0]),
            row_count=torch.zeros(MAX_ROWS, dtype=torch.int32, device=weights.fc.device),
        )
