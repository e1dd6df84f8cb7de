"""Launches that repeat, captured as CUDA graphs; and what takes their place under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from math import gcd
from typing import Any

import torch

from lean_laguna.kernels.triton.launch import Tile
from lean_laguna.kernels.triton.tiles import Tiles
from lean_laguna.models.dflash import DFlashDrafter


@dataclass
class Program:
    """Launches that always are the same: run as they are the first time, as a captured graph from then on.

    Attributes:
        body: Launches on buffers that stay where they are.
        pool: Of the graphs' memory; None runs the body every time.
    """

    body: Callable[[], None]
    pool: Any
    _num_runs: int = 0
    _graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        """Launch it."""
        self._num_runs += 1
        if self._graph is None and self.pool is not None and self._num_runs > 1:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                self.body()
            self._graph = graph
        if self._graph is None:
            self.body()
        else:
            self._graph.replay()


def interpreted_tiles(drafter: DFlashDrafter | None) -> Tiles:
    """Return tiles that make few programs: under the interpreter they run one after another."""
    tiles = {field.name: Tile(64, 64, split=2, warps=1, stages=1) for field in fields(Tiles)}
    if drafter is not None:
        config = drafter.config
        rows = gcd(64, 2 * config.num_key_value_heads * config.head_dim)  # of one layer's norm
        tiles["context"] = Tile(rows, 64, split=2, warps=1, stages=1)
    return Tiles(**tiles | {"head": Tile(128, 64, warps=1, stages=1)})
