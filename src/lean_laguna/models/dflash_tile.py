"""The served pass of a DFlash drafter for one block of one sequence on a CPU.

The operations of ``dflash_layers`` through kernels that were prepared once, over a context that is kept from
step to step: at a few rows Python costs more than arithmetic.
"""

from __future__ import annotations

import weakref
from typing import cast

import torch
import torch.nn.functional as F

from lean_laguna.core.drafter_config import DFlashConfig
from lean_laguna.kernels.draft_attention import block_mask
from lean_laguna.kernels.draft_tile import BlockAttention, ContextMirror
from lean_laguna.kernels.prepared import TileNorm
from lean_laguna.models.dflash_layers import DFlashLayer
from lean_laguna.models.forward_batch import ForwardBatch
from lean_laguna.models.kv_cache import KVCache
from lean_laguna.models.rope import RotaryEmbedding

MAX_ROWS = 16
"""Rows up to which a pass is prepared; larger ones gain nothing."""
_MAX_WINDOW = 1024

Turn = tuple[torch.Tensor, tuple[torch.Tensor, ...]]


class BlockLayer:
    """One draft layer for blocks of R rows."""

    def __init__(self, layer: DFlashLayer, attention: BlockAttention, norm: TileNorm, gate_up: torch.Tensor):
        own = layer.self_attn
        self._input_weight, self._post_weight = layer.input_layernorm, layer.post_attention_layernorm
        self._q_weight, self._k_weight = own.q_norm, own.k_norm
        self._norm, self._attention, self._gate_up = norm, attention, gate_up
        self._gate, self._up = gate_up.chunk(2, -1)
        self._qkvg, self._o_proj = own.packed.t(), own.o_proj.weight.t()
        self._gate_up_proj, self._down_proj = layer.gate_up_proj.weight.t(), layer.down_proj.weight.t()

    def run(
        self,
        residual: torch.Tensor,
        turn: Turn,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor,
    ) -> None:
        """Advance the residual stream [R, D] in place; the rows' keys and values go after the context's.

        Args:
            residual: Changed.
            turn: Cos [R, 1, rotating dimensions], and both halves of the signed sine.
            keys: [J, P, C + R]; the last R are changed.
            values: [J, C + R, P]; the last R are changed.
            mask: [R, 1, C + R].
        """
        attention, num_rows = self._attention, residual.shape[0]
        torch.mm(self._norm(residual, self._input_weight), self._qkvg, out=attention.joint)
        attention.turn(self._q_weight, self._k_weight, *turn)
        keys[..., -num_rows:].copy_(attention.own_keys)
        values[:, -num_rows:].copy_(attention.own_values)
        residual.addmm_(attention.attend_to(keys, values, mask), self._o_proj)
        torch.mm(self._norm(residual, self._post_weight), self._gate_up_proj, out=self._gate_up)
        residual.addmm_(F.silu(self._gate).mul_(self._up), self._down_proj)


class DraftPasses:
    """The prepared passes of a drafter by their number of rows, and the mirror of its context.

    Made anew whenever the weights' layout changes. For one sequence at a time, and drafters whose layers all
    have one window; ``fits`` says so.
    """

    def __init__(self, config: DFlashConfig, layers: list[DFlashLayer], rotary: RotaryEmbedding, group: int):
        """Set the mirror up.

        Args:
            config: Of the drafter.
            layers: Packed.
            rotary: Of every layer.
            group: KV group of the layers.
        """
        assert config.window is not None
        self._config, self._layers, self._rotary, self._group = config, layers, rotary, group
        self._by_rows: dict[int, list[BlockLayer]] = {}
        self._mirror = ContextMirror(len(layers), config.num_key_value_heads, config.head_dim, config.window)
        self._mirrored: weakref.ref[KVCache] | None = None

    @staticmethod
    def fits(config: DFlashConfig, weight: torch.Tensor) -> bool:
        """Whether a drafter with such weights can run prepared."""
        windows = set(config.layer_windows)
        return (
            weight.is_cpu
            and weight.dtype == torch.float32
            and len(windows) == 1
            and None not in windows
            and cast(int, config.window) <= _MAX_WINDOW
        )

    def prepare(self, batch: ForwardBatch, kv_cache: KVCache) -> int | None:
        """Hold the context of a batch; return its number of positions, None where the batch does not fit."""
        if len(batch.spans) > 1 or batch.spans[0].num_rows > MAX_ROWS or kv_cache.dtype != torch.float32:
            return None
        is_known = self._mirrored is not None and self._mirrored() is kv_cache
        self._mirrored = weakref.ref(kv_cache)
        return self._mirror.prepare(
            batch.spans[0],
            self._group,
            kv_cache.pages(self._group),
            kv_cache.kv_block_size,
            kv_cache.num_changes[self._group] if is_known else None,
        )

    def run(self, residual: torch.Tensor, batch: ForwardBatch, kv_cache: KVCache, num_context: int) -> None:
        """Run a prepared block through every layer.

        Args:
            residual: Embeddings [R, D]; changed.
            batch: As prepared.
            kv_cache: Likewise.
            num_context: What ``prepare`` returned.
        """
        num_rows = residual.shape[0]
        layers = self._by_rows.get(num_rows)
        if layers is None:
            with torch.inference_mode(False), torch.no_grad():
                layers = self._by_rows[num_rows] = self._make(num_rows)
        cos, signed_sin = self._rotary.turns_from(batch.spans[0].first_position, num_rows)
        turn = cos, signed_sin.chunk(2, -1)
        keys, values = self._mirror.columns(num_context, num_rows)
        masks = {
            causal: block_mask(num_rows, num_context, self._config.window, causal)[0, 0].unsqueeze(1)
            for causal in set(self._config.layer_causal)
        }
        for i, layer in enumerate(layers):
            layer.run(residual, turn, keys[i], values[i], masks[self._config.layer_causal[i]])
        self._mirror.seal(kv_cache.num_changes[self._group])

    def append(self, kv: torch.Tensor, batch: ForwardBatch, kv_cache: KVCache) -> None:
        """Write the keys and values of a prepared batch's rows into their pages and the mirror.

        Args:
            kv: [n, L, 2, J, P].
            batch: As prepared.
            kv_cache: Likewise; changed.
        """
        self._mirror.append(kv)
        kv_cache.write_layers(self._group, batch.slot_mapping(self._group), kv)
        self._mirror.seal(kv_cache.num_changes[self._group])

    def _make(self, num_rows: int) -> list[BlockLayer]:
        config, own = self._config, self._layers[0].self_attn
        attention = BlockAttention(
            torch.empty(num_rows, own.packed.shape[0]),
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            self._rotary.rotary_dim,
            config.rms_norm_eps,
        )
        norm = TileNorm((num_rows, config.hidden_size), config.rms_norm_eps)
        gate_up = torch.empty(num_rows, 2 * config.intermediate_size)
        return [BlockLayer(layer, attention, norm, gate_up) for layer in self._layers]
