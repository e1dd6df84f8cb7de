"""The DFlash drafter: one pass over [anchor, MASK, MASK, ...] proposes a whole block of tokens.

Its context is not its own past but the target's: hidden states tapped after chosen target layers, projected
to keys and values at their absolute positions. A mask slot at position p predicts the token at p. Embedding
and lm_head are the target's and never registered here; a drafter with a reduced vocabulary brings its own.
Not the choice of tokens (``spec``), not the training masks (``train``).

Source: DFlash (z-lab dflash 0.1.0 model.py); Laguna's variant: vLLM 0.33 laguna_dflash.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lean_laguna.core.drafter_config import DFlashConfig
from lean_laguna.kernels import dispatch
from lean_laguna.kernels.draft_attention import BlockPlan, plan_block_attention
from lean_laguna.kernels.linear import ROW_TILE, TILE_HEIGHTS
from lean_laguna.models.dflash_layers import DFlashLayer, Rotation, norm
from lean_laguna.models.dflash_tile import DraftPasses
from lean_laguna.models.forward_batch import ForwardBatch
from lean_laguna.models.kv_cache import KVCache, KVGroup
from lean_laguna.models.packing import pack_rows
from lean_laguna.models.rope import RotaryEmbedding
from lean_laguna.quant.packed import PackedWeight

DRAFT_FULL_GROUP = 2  # KV groups 0 and 1 are the target's
DRAFT_SLIDING_GROUP = 3

Embed = Callable[[Tensor], Tensor]
Attend = Callable[[int, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class DFlashDrafter(nn.Module):
    """The drafter's network; owns its weights, not the embedding and lm_head it borrows from the target.

    Weights are fused as they are used (q|k|v, gate|up, one row of ``aux_hidden_norms`` per tap);
    ``drafter_checkpoint`` splits and joins them.

    Attributes:
        packed_weights: Codes and scales of quantised linears, by parameter name.
    """

    d2t: Tensor | None

    def __init__(self, config: DFlashConfig):
        super().__init__()
        self.config = config
        width, num_taps = config.hidden_size, len(config.target_layer_ids)
        self.aux_hidden_norms = nn.Parameter(torch.ones(num_taps, width)) if config.has_aux_norms else None
        self.fc = nn.Linear(num_taps * width, width, bias=False)
        self.hidden_norm = nn.Parameter(torch.ones(width))
        self.layers = nn.ModuleList(DFlashLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.Parameter(torch.ones(width))
        own_vocab = config.draft_vocab_size if config.has_own_lm_head else None
        self.lm_head = nn.Linear(width, own_vocab, bias=False) if own_vocab else None
        self.register_buffer("d2t", torch.zeros(own_vocab, dtype=torch.int64) if own_vocab else None)
        with torch.device("cpu"):  # a real table even where the weights are built on the meta device
            self.rotary = RotaryEmbedding(config.rope, config.head_dim, config.max_position_embeddings)
        self.packed_weights: dict[str, PackedWeight] = {}
        self._place = _places(config.layer_windows)
        self._passes: DraftPasses | None = None
        self._is_packed = False

    def init_weights(self, std: float = 0.02, generator: torch.Generator | None = None) -> None:
        """Draw all projections from N(0, std^2) and set all norms to one, in place."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2 and name != "aux_hidden_norms":
                nn.init.normal_(parameter, std=std, generator=generator)
            else:
                nn.init.ones_(parameter)

    def kv_groups(self) -> tuple[KVGroup, KVGroup]:
        """Return the groups of the context cache, full layers first; either may hold no layer."""
        shape = (self.config.num_key_value_heads, self.config.head_dim)
        num_full = sum(window is None for window in self.config.layer_windows)
        num_sliding = self.config.num_hidden_layers - num_full
        return (
            KVGroup("draft_full", num_full, *shape, None),
            KVGroup("draft_sliding", num_sliding, *shape, self.config.window),
        )

    def context_features(self, aux_hidden_states: Tensor) -> Tensor:
        """Fold the target's tapped hidden states into one context row per position, differentiably.

        Args:
            aux_hidden_states: [..., m, D] raw residuals in the order of ``target_layer_ids``.

        Returns:
            [..., D].
        """
        rows, eps = aux_hidden_states, self.config.rms_norm_eps
        if self.aux_hidden_norms is not None:
            rows = norm(rows, self.aux_hidden_norms, eps)
        return norm(F.linear(rows.flatten(-2), self.fc.weight), self.hidden_norm, eps)

    @torch.no_grad()
    def append_context(self, aux_hidden_states: Tensor, batch: ForwardBatch, kv_cache: KVCache) -> None:
        """Write the context keys and values of rows into the paged cache, in place.

        Rows of rejected drafts may be among them: they are overwritten before any block can see them.

        Args:
            aux_hidden_states: [T, m, D] taps of the batch's rows.
            batch: The rows' positions and block tables, the drafter's groups among them.
            kv_cache: Holds the groups of ``kv_groups`` at indices 2 and 3.
        """
        self.pack()
        num_rows, eps = batch.positions.shape[0], self.config.rms_norm_eps
        passes = self._passes
        is_prepared = passes is not None and passes.prepare(batch, kv_cache) is not None
        padding = next((h for h in TILE_HEIGHTS if h >= num_rows), num_rows + -num_rows % ROW_TILE) - num_rows
        rows = aux_hidden_states.to(self.norm.dtype)
        if padding:
            rows = F.pad(rows, (0, 0, 0, 0, 0, padding))
        if self.aux_hidden_norms is not None:
            rows = dispatch.rms_norm(rows, self.aux_hidden_norms, eps)
        context = dispatch.linear(rows.flatten(1), self.fc.weight)
        context = dispatch.rms_norm(context, self.hidden_norm, eps)
        # The layers' keys are normed and rotated in one go: on a CPU the number of operations decides.
        layers = self._draft_layers()
        scaled = dispatch.rms_scale(context, eps) if self.config.norm_context else context
        inputs = [scaled * layer.input_layernorm if layer.norm_context else context for layer in layers]
        kv = torch.stack(
            [
                dispatch.linear(x, layer.self_attn.kv_weight())[:num_rows]
                for x, layer in zip(inputs, layers, strict=True)
            ],
            dim=1,
        ).view(num_rows, len(layers), 2, self.config.num_key_value_heads, self.config.head_dim)
        k = dispatch.rms_scale_(kv[:, :, 0], eps)
        k.mul_(torch.stack([layer.self_attn.k_norm for layer in layers]).unsqueeze(1))
        rotation = (
            Rotation(*self.rotary.turns_from(batch.spans[0].first_position, num_rows))
            if is_prepared
            else self._rotation(batch.positions)
        )
        dispatch.rotate_(k, rotation.cos.unsqueeze(1), rotation.signed_sin.unsqueeze(1))
        if is_prepared and passes is not None:
            passes.append(kv, batch, kv_cache)
            return
        for group in {group for group, _ in self._place}:
            own = [i for i, (of, _) in enumerate(self._place) if of == group]
            kv_cache.write_layers(
                group, batch.slot_mapping(group), kv if len(own) == len(layers) else kv[:, own]
            )

    @torch.no_grad()
    def propose(self, batch: ForwardBatch, kv_cache: KVCache, embed: Embed) -> Tensor:
        """Run every request's block against its cached context; the cache is only read.

        Args:
            batch: Packed blocks [anchor, MASK, ...], one span a request, of any lengths up to the block size;
                ``first_position`` is the anchor's, and the context is all cached positions before it.
            kv_cache: As for ``append_context``.
            embed: The target's embedding, [T] ids to [T, D].

        Returns:
            [T, D] after the final norm; a mask row is for the token at its position, anchors have no use.
        """
        config = self.config
        assert all(s.first_position + s.num_rows <= config.max_position_embeddings for s in batch.spans)
        self.pack()
        num_context = self._passes.prepare(batch, kv_cache) if self._passes is not None else None
        if num_context is not None and self._passes is not None:
            residual = embed(batch.input_ids).to(self.norm.dtype)
            self._passes.run(residual, batch, kv_cache, num_context)
            return dispatch.rms_norm(residual, self.norm, config.rms_norm_eps)
        return self._propose_packed(batch, kv_cache, embed)

    def _propose_packed(self, batch: ForwardBatch, kv_cache: KVCache, embed: Embed) -> Tensor:
        """Run blocks of any number of requests, on any device."""
        config = self.config
        ids, positions = batch.input_ids, batch.positions
        num_rows = ids.shape[0]
        padding = -num_rows % ROW_TILE
        if padding:
            # Whole tiles from here on; padding rows repeat the last and are dropped at the end.
            ids, positions = (torch.cat((rows, rows[-1:].expand(padding))) for rows in (ids, positions))
        residual = embed(ids).to(self.norm.dtype)
        rotation = self._rotation(positions)
        plans: dict[tuple[int, bool], BlockPlan] = {}
        for i, (layer, (group, index)) in enumerate(zip(self._draft_layers(), self._place, strict=True)):
            key = (group, config.layer_causal[i])
            if key not in plans:
                plans[key] = plan_block_attention(
                    batch.spans,
                    group,
                    batch.kv_block_size,
                    window=config.layer_windows[i],
                    causal=config.layer_causal[i],
                    device=residual.device,
                )
            layer.run(residual, rotation, kv_cache.storage(group, index), plans[key])
        return dispatch.rms_norm(residual, self.norm, config.rms_norm_eps)[:num_rows]

    def compute_logits(self, hidden: Tensor, target_logits: Callable[[Tensor], Tensor]) -> Tensor:
        """Turn proposal rows into logits over the target's vocabulary.

        Args:
            hidden: [R, D] from ``propose``.
            target_logits: The target's ``compute_logits``, [R, D] to [R, V] float32.

        Returns:
            [R, V] float32; words outside a reduced draft vocabulary are -inf.
        """
        if self.lm_head is None:
            return target_logits(hidden)
        assert self.d2t is not None
        own = dispatch.linear(hidden, self.lm_head.weight).float()
        logits = own.new_full((own.shape[0], self.config.vocab_size), float("-inf"))
        return logits.index_copy_(1, torch.arange(own.shape[1], device=own.device) + self.d2t, own)

    def forward_dense(
        self,
        block_embeds: Tensor,
        block_positions: Tensor,
        aux_hidden_states: Tensor,
        context_positions: Tensor,
        attend: Attend,
    ) -> Tensor:
        """Run many blocks over one packed context, differentiably and without a cache.

        Args:
            block_embeds: [N, Q, D] embeddings of [anchor, MASK, ...].
            block_positions: [N, Q] absolute positions within the document.
            aux_hidden_states: [S, m, D] taps of the context rows.
            context_positions: [S] positions within the document.
            attend: From (layer index, q [N, Q, H, P], context k and v [S, J, P], block k and v [N, Q, J, P])
                to [N, Q, H, P]; it owns the mask and the scale.

        Returns:
            [N, Q, D] after the final norm.
        """
        context = self.context_features(aux_hidden_states)
        context_cos, context_sin = (part.unsqueeze(-2) for part in self.rotary.compute(context_positions))
        cos, sin = (part.unsqueeze(-2) for part in self.rotary.compute(block_positions))
        hidden = block_embeds
        for i, layer in enumerate(self._draft_layers()):
            context_k, context_v = layer.dense_context_kv(context, context_cos, context_sin)

            def attend_blocks(
                q: Tensor, k: Tensor, v: Tensor, i: int = i, ck: Tensor = context_k, cv: Tensor = context_v
            ) -> Tensor:
                return attend(i, q, ck, cv, k, v)

            hidden = layer.dense(hidden, cos, sin, attend_blocks)
        return norm(hidden, self.norm, self.config.rms_norm_eps)

    def pack(self) -> None:
        """Lay weights out for the served path, in place; names, shapes and values stay."""
        if self._is_packed:
            return
        # Not under inference mode, whose tensors could never be trained on.
        with torch.inference_mode(False), torch.no_grad():
            for layer in self._draft_layers():
                layer.pack(True)
            pack_rows([self.fc.weight])
            if self.lm_head is not None:
                pack_rows([cast(nn.Parameter, self.lm_head.weight)])
        if DraftPasses.fits(self.config, self.norm):
            self._passes = DraftPasses(self.config, self._draft_layers(), self.rotary, DRAFT_SLIDING_GROUP)
        self._is_packed = True

    def unpack(self) -> None:
        """Forget the served path's layout; the next served call makes it anew."""
        for layer in self._draft_layers():
            layer.pack(False)
        self._passes = None
        self._is_packed = False

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load weights as ``nn.Module.load_state_dict`` does."""
        self.unpack()
        self.packed_weights = {}
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> DFlashDrafter:
        # Moving or casting gives every parameter a storage of its own.
        self.unpack()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch has no types here
        return self

    def _draft_layers(self) -> list[DFlashLayer]:
        return cast("list[DFlashLayer]", list(self.layers))

    def _rotation(self, positions: Tensor) -> Rotation:
        return Rotation.of(*self.rotary(positions), self.norm.dtype)


def _places(layer_windows: tuple[int | None, ...]) -> tuple[tuple[int, int], ...]:
    """Return per layer its KV group and its index within the group."""
    counts = {DRAFT_FULL_GROUP: 0, DRAFT_SLIDING_GROUP: 0}
    found = []
    for window in layer_windows:
        group = DRAFT_FULL_GROUP if window is None else DRAFT_SLIDING_GROUP
        found.append((group, counts[group]))
        counts[group] += 1
    return tuple(found)
