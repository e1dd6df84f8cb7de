"""The Laguna target: embedding, decoder layers, final norm, output head.

Parameters carry Hugging Face's names, experts fused as transformers holds them. Weights in and out:
``checkpoint``.

Source: transformers, models/laguna/modeling_laguna.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from lean_laguna.core.model_config import LagunaConfig, LayerType
from lean_laguna.kernels import dispatch
from lean_laguna.kernels.kv_mirror import TilePlan
from lean_laguna.models.dense_attention import Backend, make_attend, reset_positions
from lean_laguna.models.forward_batch import ForwardBatch
from lean_laguna.models.kv_cache import KVCache, KVGroup
from lean_laguna.models.laguna_layers import MLP, DecoderLayer, LayerStep, RMSNorm
from lean_laguna.models.laguna_tile import TilePasses
from lean_laguna.models.packing import pack_rows
from lean_laguna.models.rope import RotaryEmbedding
from lean_laguna.quant.packed import PackedWeight

FULL_GROUP, SLIDING_GROUP = 0, 1
_KINDS: tuple[LayerType, ...] = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class TargetOutput:
    """Result of the served path.

    Attributes:
        hidden_states: [T, D] after the final norm.
        aux_hidden_states: [T, m, D] raw residual after the tapped layers, or None.
    """

    hidden_states: torch.Tensor
    aux_hidden_states: torch.Tensor | None


@dataclass(frozen=True)
class DenseOutput:
    """Result of the whole-sequence path.

    Attributes:
        hidden_states: [B, S, D] after the final norm.
        aux_hidden_states: [B, S, m, D] raw residual after the tapped layers, or None.
        last_residual: [B, S, D] before the final norm.
        expert_ids: Per sparse layer [B * S, A], where asked for.
    """

    hidden_states: torch.Tensor
    aux_hidden_states: torch.Tensor | None
    last_residual: torch.Tensor
    expert_ids: list[torch.Tensor]


class LagunaModel(nn.Module):
    """Everything below the output head; exists for its parameters' names."""

    def __init__(self, config: LagunaConfig):
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class LagunaForCausalLM(nn.Module):
    """A Laguna target; owns its weights, not the KV cache.

    On a CPU the served path's rows are independent: hidden states and logits of a row are the same bits in
    any batch, in prefill, decode and verification.
    """

    def __init__(self, config: LagunaConfig):
        super().__init__()
        self.config = config
        self.model = LagunaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.rotary = {
            kind: RotaryEmbedding(config.rope(kind), config.head_dim, config.max_position_embeddings)
            for kind in _KINDS
        }
        self._place: list[tuple[int, int]] = []
        counts = [0, 0]
        for kind in config.layer_types:
            group = _KINDS.index(kind)
            self._place.append((group, counts[group]))
            counts[group] += 1
        self._groups = self.kv_groups()
        self._tile_passes: TilePasses | None = None
        self._is_packed = False
        # Of a quantised checkpoint: weights that stay packed, by parameter, and the FP8 cache's scales.
        self.packed_weights: dict[str, PackedWeight] = {}
        self.kv_scales: dict[str, float] = {}

    def reset_parameters(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Draw weights from a normal distribution of deviation ``std``; norms are 1, correction biases 0."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.endswith("norm.weight"):
                    parameter.fill_(1.0)
                elif name.endswith("e_score_correction_bias"):
                    parameter.zero_()
                else:
                    parameter.normal_(0.0, std, generator=generator)

    @property
    def layers(self) -> list[DecoderLayer]:
        """The decoder layers, in order."""
        return cast("list[DecoderLayer]", list(self.model.layers))

    def read_together(self) -> list[tuple[str, ...]]:
        """Name the linears of one input, in the order in which the GPU kernels read them as one weight."""
        found: list[tuple[str, ...]] = []
        for i, layer in enumerate(self.layers):
            attention, mlp, prefix = layer.self_attn, layer.mlp, f"model.layers.{i}."
            kinds = "qkvg" if attention.gating != "off" else "qkv"
            found.append(tuple(f"{prefix}self_attn.{kind}_proj.weight" for kind in kinds))
            own = f"{prefix}mlp." if isinstance(mlp, MLP) else f"{prefix}mlp.shared_experts."
            pair = (f"{own}gate_proj.weight", f"{own}up_proj.weight")
            found.append(pair if isinstance(mlp, MLP) else (f"{prefix}mlp.gate.weight", *pair))
        return found

    def kv_groups(self) -> tuple[KVGroup, KVGroup]:
        """KV groups of full-attention and of sliding layers, in this order; either may have no layers."""
        config = self.config
        counts = [sum(group == wanted for group, _ in self._place) for wanted in (FULL_GROUP, SLIDING_GROUP)]
        heads, head_dim = config.num_key_value_heads, config.head_dim
        return (
            KVGroup("full", counts[0], heads, head_dim, None),
            KVGroup("sliding", counts[1], heads, head_dim, config.sliding_window),
        )

    def kv_scales_of(self, layer: int) -> tuple[float, float]:
        """Return what a layer's FP8 codes of keys and of values are multiplied by; 1 where none is stored."""
        names = (f"model.layers.{layer}.self_attn.{kind}_scale" for kind in "kv")
        k_scale, v_scale = (self.kv_scales.get(name, 1.0) for name in names)
        return k_scale, v_scale

    @torch.no_grad()
    def forward(
        self, batch: ForwardBatch, kv_cache: KVCache, *, tap_layer_ids: tuple[int, ...] = ()
    ) -> TargetOutput:
        """Compute packed rows against the paged cache, writing their keys and values.

        Args:
            batch: Rows and pages.
            kv_cache: Holds the groups of ``kv_groups`` first; changed.
            tap_layer_ids: 0-based layers whose raw residual output is wanted.

        Returns:
            Hidden states and taps of the batch's rows, in its order.

        Raises:
            ValueError: A row sees a position whose page is not kept.
        """
        if not self._is_packed:
            self.pack()
        tile = self._tile_plans(batch, kv_cache)
        num_rows = batch.input_ids.shape[0]
        padding = tile[0] - num_rows if tile else -num_rows % dispatch.ROW_TILE
        ids, positions = batch.input_ids, batch.positions
        if padding:
            # Whole tiles from here on; padding rows repeat the last and are dropped at the end.
            ids, positions = (torch.cat((rows, rows[-1:].expand(padding))) for rows in (ids, positions))
        residual = F.embedding(ids, self.model.embed_tokens.weight)
        if tile is not None and self._tile_passes is not None:
            turns = self._turns(batch, positions)
            taps = self._tile_passes.run(residual, kv_cache, self._place, tile[1], turns, tap_layer_ids)
        else:
            taps = self._run_layers(residual, kv_cache, self._steps(batch, positions), tap_layer_ids)
        hidden = self.model.norm(residual)[:num_rows]
        aux = torch.stack([taps[i][:num_rows] for i in tap_layer_ids], dim=1) if tap_layer_ids else None
        return TargetOutput(hidden, aux)

    def _tile_plans(self, batch: ForwardBatch, kv_cache: KVCache) -> tuple[int, list[TilePlan | None]] | None:
        """Return the height and the plans of the prepared pass for a batch; None where it must go without."""
        if self._tile_passes is None:
            self._tile_passes = TilePasses(self.config, self.layers, self._groups)
        return self._tile_passes.plan(batch, kv_cache)

    def _run_layers(
        self,
        residual: torch.Tensor,
        kv_cache: KVCache,
        steps: list[LayerStep | None],
        tap_layer_ids: tuple[int, ...],
    ) -> dict[int, torch.Tensor]:
        """Run every layer over the residual stream, in place; return copies of it after the tapped layers."""
        taps: dict[int, torch.Tensor] = {}
        for i, (layer, (group, index)) in enumerate(zip(self.layers, self._place, strict=True)):
            step = steps[group]
            assert step is not None, "the group has this layer"
            layer.run(residual, kv_cache.storage(group, index), step)
            if i in tap_layer_ids:
                taps[i] = residual.clone()
        return taps

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [R, V] float32 of hidden states [R, D] after the final norm.

        Differentiable where ``hidden`` wants gradients; row-invariant where not.
        """
        if hidden.requires_grad and torch.is_grad_enabled():
            return F.linear(hidden, self.lm_head.weight).float()
        with torch.no_grad():
            return dispatch.linear(hidden, self.lm_head.weight).float()

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return embeddings [..., D] of token ids [...]."""
        return F.embedding(input_ids, self.model.embed_tokens.weight)

    def forward_dense(
        self,
        input_ids: torch.Tensor,
        *,
        positions: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        tap_layer_ids: tuple[int, ...] = (),
        collect_expert_ids: bool = False,
        attention: Backend = "auto",
    ) -> DenseOutput:
        """Compute whole sequences, differentiably; the bits are not those of ``forward``.

        Args:
            input_ids: [B, S] int64.
            positions: [B, S]; None counts from 0, anew in each document.
            document_ids: [B, S]; rows see their own document only. None: one document per sequence.
            tap_layer_ids: 0-based layers whose raw residual output is wanted.
            collect_expert_ids: Return each sparse layer's chosen experts.
            attention: How to attend; see ``dense_attention.make_attend``.

        Returns:
            Hidden states, taps, last residual and expert ids; logits are ``lm_head`` of the hidden states.
        """
        if positions is None:
            if document_ids is not None:
                positions = reset_positions(document_ids)
            else:
                positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        used = set(self.config.layer_types)
        turns = {kind: self.rotary[kind].compute(positions) for kind in used}
        windows = {"full_attention": None, "sliding_attention": self.config.sliding_window}
        attends = {kind: make_attend(positions, document_ids, windows[kind], attention) for kind in used}
        residual = self.embed(input_ids)
        taps: dict[int, torch.Tensor] = {}
        collected: list[torch.Tensor] = []
        for i, (layer, kind) in enumerate(zip(self.layers, self.config.layer_types, strict=True)):
            residual, expert_ids = layer.dense(residual, *turns[kind], attends[kind])
            if collect_expert_ids and expert_ids is not None:
                collected.append(expert_ids)
            if i in tap_layer_ids:
                taps[i] = residual
        wide = residual.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.model.norm.eps)).to(
            residual.dtype
        )
        aux = torch.stack([taps[i] for i in tap_layer_ids], dim=2) if tap_layer_ids else None
        return DenseOutput(normed * self.model.norm.weight, aux, residual, collected)

    def pack(self) -> None:
        """Lay weights out for the served path, in place; names, shapes and values stay."""
        # Not under inference mode, whose tensors could never be trained on.
        with torch.inference_mode(False), torch.no_grad():
            for i, layer in enumerate(self.layers):
                layer.pack(True)
                layer.self_attn.kv_scales = self.kv_scales_of(i)
            if not self.config.tie_word_embeddings:
                pack_rows([self.lm_head.weight])
        self._is_packed = True

    def unpack(self) -> None:
        """Forget the served path's layout; the next ``forward`` makes it anew."""
        for layer in self.layers:
            layer.pack(False)
        self._tile_passes = None
        self._is_packed = False

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load weights as ``nn.Module.load_state_dict`` does."""
        self.unpack()
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> LagunaForCausalLM:
        # Moving or casting gives every parameter a storage of its own.
        self.unpack()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch has no types here
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        return self

    def _turns(self, batch: ForwardBatch, positions: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return cos and signed sine of each kind of layer, [T, 1, R] in the weights' dtype."""
        dtype = self.model.embed_tokens.weight.dtype
        num_positions = max(span.first_position + span.num_rows for span in batch.spans)
        turns = [self.rotary[kind].turns(positions, num_positions) for kind in _KINDS]
        return [(cos.to(dtype), signed_sin.to(dtype)) for cos, signed_sin in turns]

    def _steps(self, batch: ForwardBatch, positions: torch.Tensor) -> list[LayerStep | None]:
        """Lay out the pass for each KV group; None where a group has no layers."""
        turns = self._turns(batch, positions)
        tiles = dispatch.Tiles(batch.spans)
        steps: list[LayerStep | None] = []
        for (cos, signed_sin), group in zip(turns, self._groups, strict=True):
            if not group.num_layers:
                steps.append(None)
                continue
            plan = dispatch.plan_attention(
                tiles,
                len(steps),
                batch.kv_block_size,
                group.num_kv_heads,
                group.head_dim,
                group.window,
                positions.device,
            )
            steps.append(LayerStep(plan, cos, signed_sin))
        return steps
