"""Random weights in the shape of a Laguna target and its DFlash drafter, for timing, not for text."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lean_laguna.kernels.triton.attention import AttentionShape
from lean_laguna.kernels.triton.launch import MAX_ROWS
from lean_laguna.kernels.triton.step import Caches
from lean_laguna.kernels.triton.weights import (
    AttentionWeights,
    DenseWeights,
    DrafterWeights,
    LayerWeights,
    SparseWeights,
    TargetWeights,
    rotary_tables,
)


@dataclass(frozen=True)
class Shape:
    """Sizes of a target and of its drafter's dense layers."""

    hidden: int
    layers: int
    full_heads: int
    sliding_heads: int
    kv_heads: int
    head_dim: int
    window: int
    dense: int
    experts: int
    top_k: int
    expert: int
    shared: int
    vocab: int
    drafter_layers: int
    taps: tuple[int, ...]


XS = Shape(2048, 40, 48, 64, 8, 128, 512, 8192, 256, 8, 512, 512, 100352, 5, (1, 13, 25, 33, 39))
TINY = Shape(64, 3, 4, 6, 2, 16, 20, 48, 8, 2, 32, 32, 96, 1, (0, 2))
LEGAL = Shape(256, 5, 8, 16, 2, 128, 20, 256, 32, 2, 256, 256, 96, 1, (0, 2))
"""The least that the CUDA C++ kernels take: without a GPU a script can ask for its kernels at these sizes."""


class Maker:
    """Draws weights of one dtype on one device."""

    def __init__(self, shape: Shape, max_len: int, device: str, dtype: torch.dtype):
        self.shape, self.device, self.dtype = shape, device, dtype
        self.tables = {
            False: self._rotary(shape.head_dim // 2, 500000.0, max_len),
            True: self._rotary(shape.head_dim, 10000.0, max_len),
        }

    def _rotary(self, dims: int, base: float, max_len: int) -> tuple[Tensor, Tensor]:
        inv_freq = base ** -(torch.arange(dims // 2, device=self.device, dtype=torch.float32) * 2 / dims)
        return rotary_tables(inv_freq, max_len, 1.0, self.dtype)

    def normal(self, *size: int, scale: float = 0.02) -> Tensor:
        return torch.empty(size, device=self.device, dtype=self.dtype).normal_(0.0, scale)

    def ones(self, *size: int) -> Tensor:
        return torch.ones(size, device=self.device, dtype=self.dtype)

    def attention(self, sliding: bool) -> AttentionWeights:
        s = self.shape
        heads = s.sliding_heads if sliding else s.full_heads
        shape = AttentionShape(
            heads,
            s.kv_heads,
            s.head_dim,
            s.head_dim if sliding else s.head_dim // 2,
            s.window if sliding else 0,
        )
        out = self.normal(s.hidden, heads * s.head_dim)
        norms = self.ones(s.head_dim), self.ones(s.head_dim)
        return AttentionWeights(shape, self.ones(s.hidden), self.normal(shape.width, s.hidden), *norms, out)

    def dense(self) -> DenseWeights:
        s = self.shape
        return DenseWeights(
            self.ones(s.hidden), self.normal(2 * s.dense, s.hidden), self.normal(s.hidden, s.dense)
        )

    def sparse(self) -> SparseWeights:
        s = self.shape
        return SparseWeights(
            norm=self.ones(s.hidden),
            router_gate_up=self.normal(s.experts + 2 * s.shared, s.hidden),
            bias=torch.zeros(s.experts, device=self.device),
            gate_up=self.normal(s.experts, 2 * s.expert, s.hidden),
            down=self.normal(s.experts, s.hidden, s.expert),
            shared_down=self.normal(s.hidden, s.shared),
            top_k=s.top_k,
            scaling=2.5,
        )

    def layer(self, i: int) -> LayerWeights:
        sliding = i % 4 != 0
        mlp = self.dense() if i == 0 else self.sparse()
        return LayerWeights(self.attention(sliding), mlp, self.tables[sliding])

    def target(self) -> TargetWeights:
        s = self.shape
        layers = tuple(self.layer(i) for i in range(s.layers))
        embed = self.normal(s.vocab, s.hidden, scale=1.0)
        return TargetWeights(embed, layers, self.ones(s.hidden), self.normal(s.vocab, s.hidden), 1e-6)

    def drafter(self) -> DrafterWeights:
        s, n, m = self.shape, self.shape.drafter_layers, len(self.shape.taps)
        layers = tuple(LayerWeights(self.attention(True), self.dense(), self.tables[True]) for _ in range(n))
        return DrafterWeights(
            layers=layers,
            norm=self.ones(s.hidden),
            aux_norms=self.ones(m, s.hidden),
            fc=self.normal(s.hidden, m * s.hidden),
            hidden_norm=self.ones(s.hidden),
            context_norms=self.ones(n, s.hidden),
            context_kv=self.normal(n * 2 * s.kv_heads * s.head_dim, s.hidden),
            k_norms=self.ones(n, s.head_dim),
            mask_token=12,
            eps=1e-6,
        )

    def caches(self, layers: tuple[LayerWeights, ...], lengths: list[int], kv_block_size: int = 16) -> Caches:
        """Return pages full of random keys and values, one run of shuffled blocks for each request."""
        counts = [math.ceil(n / kv_block_size) for n in lengths]
        table = torch.zeros(MAX_ROWS, max(counts), dtype=torch.int32, device=self.device)
        order = torch.randperm(sum(counts), device=self.device).to(torch.int32) + 1
        for r, n in enumerate(counts):
            table[r, :n] = order[sum(counts[:r]) : sum(counts[:r]) + n]
        size = (sum(counts) + 1, kv_block_size, self.shape.kv_heads, self.shape.head_dim)
        pages = tuple((self.normal(*size, scale=1.0), self.normal(*size, scale=1.0)) for _ in layers)
        return Caches(pages, tuple(table for _ in layers))
