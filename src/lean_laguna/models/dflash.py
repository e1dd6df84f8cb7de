"""The DFlash drafter: one pass over [anchor, MASK, MASK, ...] proposes a whole block of tokens.

Its context is not its own past but the target's: hidden states tapped after chosen target layers, projected to keys
and values at their absolute positions. A mask slot at position p predicts the token at p. Embedding and lm_head are
the target's and never registered here; a drafter with a reduced vocabulary brings its own lm_head.
Not the choice of tokens (``spec``), not the training masks (``train``).
Source: DFlash (z-lab dflash 0.1.0 model.py); Laguna's variant: vLLM 0.33 laguna_dflash.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lean_laguna.core.drafter_config import DFlashConfig
from lean_laguna.kernels.dispatch import apply_rotary, linear, rms_norm, rotate_, silu_and_mul, softplus
from lean_laguna.kernels.draft_attention import BlockPlan, block_attention, plan_block_attention
from lean_laguna.models.kv_cache import KVCache, KVGroup
from lean_laguna.models.rope import RotaryEmbedding

if TYPE_CHECKING:
    from lean_laguna.models.forward_batch import ForwardBatch

DRAFT_FULL_GROUP = 2  # KV groups 0 and 1 are the target's
DRAFT_SLIDING_GROUP = 3

Embed = Callable[[Tensor], Tensor]
Rotate = Callable[[Tensor], Tensor]
Attend = Callable[[int, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class DFlashAttention(nn.Module):
    """Weights of one draft layer's attention, q, k and v fused; the keys seen are the caller's business."""

    def __init__(self, config: DFlashConfig):
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.q_size = self.num_heads * self.head_dim
        self.eps = config.rms_norm_eps
        width = config.hidden_size
        self.qkv_proj = nn.Linear(width, self.q_size + 2 * self.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.q_size, width, bias=False)
        self.q_norm = nn.Parameter(torch.ones(self.head_dim))
        self.k_norm = nn.Parameter(torch.ones(self.head_dim))
        gates = {"per-head": self.num_heads, "per-element": self.q_size, "off": 0}[config.gating]
        self.g_proj = nn.Linear(width, gates, bias=False) if gates else None

    def project(self, normed: Tensor, rotate: Rotate) -> tuple[Tensor, Tensor, Tensor]:
        """Project block rows to rotated q and k and to v.

        Args:
            normed: [T, D] after input_layernorm.
            rotate: Of the rows' positions.

        Returns:
            q [T, H, P], k [T, J, P], v [T, J, P].
        """
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qkv = linear(normed, self.qkv_proj.weight).view(-1, heads + 2 * kv_heads, self.head_dim)
        # One norm and one rotation for q and k together: on a CPU the number of operations decides.
        weight = torch.cat((self.q_norm.expand(heads, -1), self.k_norm.expand(kv_heads, -1)))
        qk = rotate(rms_norm(qkv[:, : heads + kv_heads], weight, self.eps))
        return qk[:, :heads], qk[:, heads:], qkv[:, heads + kv_heads :]

    def kv_weight(self) -> Tensor:
        """Return the [2JP, D] rows of the fused projection that make k and v."""
        return self.qkv_proj.weight[self.q_size :]

    def output(self, attended: Tensor, normed: Tensor) -> Tensor:
        """Gate the heads by the layer's normed input and project back.

        Args:
            attended: [T, H, P].
            normed: [T, D], the input the queries were made from.

        Returns:
            [T, D].
        """
        if self.g_proj is not None:
            gate = softplus(linear(normed, self.g_proj.weight)).to(attended.dtype)
            attended = attended * gate.view(*attended.shape[:2], -1)
        return linear(attended.reshape(-1, self.q_size), self.o_proj.weight)


class DFlashLayer(nn.Module):
    """One pre-norm draft layer."""

    def __init__(self, config: DFlashConfig):
        super().__init__()
        self.eps = config.rms_norm_eps
        self.norm_context = config.norm_context
        self.input_layernorm = nn.Parameter(torch.ones(config.hidden_size))
        self.self_attn = DFlashAttention(config)
        self.post_attention_layernorm = nn.Parameter(torch.ones(config.hidden_size))
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def context_kv(self, context: Tensor, rotate: Rotate) -> tuple[Tensor, Tensor]:
        """Project context features to rotated k and to v.

        Args:
            context: [S, D] from ``DFlashDrafter.context_features``.
            rotate: Of the rows' positions.

        Returns:
            k [S, J, P], v [S, J, P].
        """
        attn = self.self_attn
        rows = rms_norm(context, self.input_layernorm, self.eps) if self.norm_context else context
        kv = linear(rows, attn.kv_weight()).view(-1, 2 * attn.num_kv_heads, attn.head_dim)
        k = rms_norm(kv[:, : attn.num_kv_heads], attn.k_norm, self.eps)
        return rotate(k), kv[:, attn.num_kv_heads :]

    def run(
        self, hidden: Tensor, rotate: Rotate, attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Run the layer over block rows.

        Args:
            hidden: [T, D] residual stream.
            rotate: Of the rows' positions.
            attend: From q [T, H, P], k and v [T, J, P] of the block rows to the attended values [T, H, P].

        Returns:
            [T, D], the residual stream after the layer.
        """
        normed = rms_norm(hidden, self.input_layernorm, self.eps)
        q, k, v = self.self_attn.project(normed, rotate)
        hidden = hidden + self.self_attn.output(attend(q, k, v), normed)
        normed = rms_norm(hidden, self.post_attention_layernorm, self.eps)
        return hidden + linear(silu_and_mul(linear(normed, self.gate_up_proj.weight)), self.down_proj.weight)


class DFlashDrafter(nn.Module):
    """The drafter's network; owns its weights, not the embedding and lm_head it borrows from the target.

    Weights are fused as they are used (q|k|v, gate|up, one row of ``aux_hidden_norms`` per tap);
    ``drafter_checkpoint`` splits and joins them.
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
        self._slots_in_cache = _cache_layers(config.layer_windows)

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
        return (
            KVGroup("draft_full", num_full, *shape, None),
            KVGroup("draft_sliding", self.config.num_hidden_layers - num_full, *shape, self.config.window),
        )

    def context_features(self, aux_hidden_states: Tensor) -> Tensor:
        """Fold the target's tapped hidden states into one context row per position.

        Args:
            aux_hidden_states: [..., m, D] raw residuals in the order of ``target_layer_ids``.

        Returns:
            [..., D].
        """
        lead, eps = aux_hidden_states.shape[:-2], self.config.rms_norm_eps
        rows = aux_hidden_states.to(self.fc.weight.dtype)
        if self.aux_hidden_norms is not None:
            rows = rms_norm(rows, self.aux_hidden_norms, eps)
        folded = linear(rows.reshape(-1, self.fc.in_features), self.fc.weight)
        return rms_norm(folded, self.hidden_norm, eps).view(*lead, -1)

    def append_context(self, aux_hidden_states: Tensor, batch: ForwardBatch, kv_cache: KVCache) -> None:
        """Write the context keys and values of committed rows into the paged cache, in place.

        Rows of rejected drafts may be written too: the next step overwrites them before any block can see them.

        Args:
            aux_hidden_states: [T, m, D] taps of the batch's rows.
            batch: The rows' positions and block tables, the drafter's groups among them.
            kv_cache: Holds the groups of ``kv_groups`` at indices 2 and 3.
        """
        context = self.context_features(aux_hidden_states)
        rotate = self._rotation(batch.positions, context.dtype)
        slots = {group: batch.slot_mapping(group) for group in {group for group, _ in self._slots_in_cache}}
        for layer, (group, index) in zip(self.layers, self._slots_in_cache, strict=True):
            k, v = layer.context_kv(context, rotate)
            kv_cache.write(group, index, slots[group], k, v)

    def propose(self, batch: ForwardBatch, kv_cache: KVCache, embed: Embed) -> Tensor:
        """Run every request's block against its cached context; the cache is only read.

        Args:
            batch: Packed blocks [anchor, MASK, ...], one span a request, of any lengths up to the block size;
                ``first_position`` is the anchor's, and the context is all cached positions before it.
            kv_cache: As for ``append_context``.
            embed: The target's embedding, [T] ids to [T, D].

        Returns:
            [T, D] after the final norm; row r of a block is for the token at its own position, row 0 has no use.
        """
        assert all(s.first_position + s.num_rows <= self.config.max_position_embeddings for s in batch.spans)
        config = self.config
        scale = config.head_dim**-0.5
        hidden = embed(batch.input_ids).to(self.norm.dtype)
        rotate = self._rotation(batch.positions, hidden.dtype)
        plans: dict[tuple[int, bool], BlockPlan] = {}
        for i, (layer, (group, index)) in enumerate(zip(self.layers, self._slots_in_cache, strict=True)):
            key = (group, config.layer_causal[i])
            if key not in plans:
                plans[key] = plan_block_attention(
                    batch.spans, group, batch.kv_block_size,
                    window=config.layer_windows[i], causal=key[1], device=hidden.device,
                )  # fmt: skip
            stored = kv_cache.storage(group, index)

            def attend(
                q: Tensor, k: Tensor, v: Tensor, stored: Tensor = stored, plan: BlockPlan = plans[key]
            ) -> Tensor:
                return block_attention(q, k, v, stored, plan, scale)

            hidden = layer.run(hidden, rotate, attend)
        return rms_norm(hidden, self.norm, config.rms_norm_eps)

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotate:
        """Return the rotation of rows [T, heads, P] at ``positions`` [T]; without gradients it works in place."""
        cos, sin = (part.to(dtype) for part in self.rotary(positions))
        if torch.is_grad_enabled():
            return lambda rows: apply_rotary(rows, cos, sin)
        half = cos.shape[-1] // 2
        cos, signed = cos.unsqueeze(-2), torch.cat((-sin[:, :half], sin[:, half:]), dim=-1).unsqueeze(-2)
        return lambda rows: rotate_(rows, cos, signed)

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
        own = linear(hidden, self.lm_head.weight).float()
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
            attend: From (layer index, q [N, Q, H, P], context k and v [S, J, P], block k and v [N, Q, J, P]) to
                [N, Q, H, P]; it owns the mask and the scale.

        Returns:
            [N, Q, D] after the final norm.
        """
        num_blocks, num_slots = block_positions.shape
        context = self.context_features(aux_hidden_states)
        rotate_context = self._rotation(context_positions, context.dtype)
        rotate = self._rotation(block_positions.reshape(-1), block_embeds.dtype)
        hidden = block_embeds.reshape(num_blocks * num_slots, -1)
        for i, layer in enumerate(self.layers):
            context_k, context_v = layer.context_kv(context, rotate_context)

            def attend_blocks(
                q: Tensor, k: Tensor, v: Tensor, i: int = i, ck: Tensor = context_k, cv: Tensor = context_v
            ) -> Tensor:
                q, k, v = (rows.view(num_blocks, num_slots, *rows.shape[1:]) for rows in (q, k, v))
                return attend(i, q, ck, cv, k, v).reshape(-1, *q.shape[2:])

            hidden = layer.run(hidden, rotate, attend_blocks)
        return rms_norm(hidden, self.norm, self.config.rms_norm_eps).view(num_blocks, num_slots, -1)


def _cache_layers(layer_windows: tuple[int | None, ...]) -> tuple[tuple[int, int], ...]:
    """Return per layer its KV group and its index within the group."""
    counts = {DRAFT_FULL_GROUP: 0, DRAFT_SLIDING_GROUP: 0}
    found = []
    for window in layer_windows:
        group = DRAFT_FULL_GROUP if window is None else DRAFT_SLIDING_GROUP
        found.append((group, counts[group]))
        counts[group] += 1
    return tuple(found)
