"""Tiles by kernel class: what was measured fastest on an H200 by ``benchmarks/gpu_step.py``.

A tile fixes the order in which K is summed, so it may follow a weight's shape and dtype but never the number
of rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lean_laguna.kernels.triton.launch import Tile


@dataclass(frozen=True)
class Tiles:
    """One tile for each class of product in a step."""

    qkv: Tile = field(default=Tile(16, 64, split=4, warps=4, stages=4, prefetch=0.5))
    out: Tile = field(default=Tile(16, 128, split=4, warps=4, stages=4, prefetch=0.5))
    router: Tile = field(default=Tile(16, 64, split=4, warps=4, stages=4, prefetch=1.0))
    dense_gate_up: Tile = field(default=Tile(16, 64, split=4, warps=4, stages=4, prefetch=0.5))
    dense_down: Tile = field(default=Tile(16, 128, split=4, warps=4, stages=4, prefetch=0.5))
    expert_gate_up: Tile = field(default=Tile(16, 64, split=4, warps=4, stages=4))
    expert_down: Tile = field(default=Tile(16, 128, split=4, warps=4, stages=4, prefetch=1.0))
    context: Tile = field(default=Tile(16, 64, split=4, warps=4, stages=4))
    head: Tile = field(default=Tile(64, 128, split=1, warps=4, stages=3))
