"""The experts of a chunk of a prompt in CUDA C++, on Hopper: grouped products over rows sorted by expert."""

from __future__ import annotations

import torch
from torch import Tensor

from lean_laguna.core.engine_sizes import EXPERT_COLUMNS
from lean_laguna.kernels.cuda.compiler import Source
from lean_laguna.kernels.cuda.driver import multiprocessors, row_map
from lean_laguna.kernels.cuda.launching import launch_kernel
from lean_laguna.kernels.triton.launch import Launch, cdiv
from lean_laguna.kernels.triton.prefill_sort import ExpertSort

TILE_ROWS = 256
"""Rows of one expert that a cluster takes at a time, as given to ``sort_by_expert``."""
CLUSTER = 2
THREADS = 384
COLUMNS, DEPTH, STAGES = EXPERT_COLUMNS, 64, 4
"""Of the weights: columns of a cluster, values of k of a stage, and stages on their way."""


def fits_prompt_experts(gate_up: object, down: object) -> bool:
    """Say whether ``chunk_up`` and ``chunk_down`` take a layer's experts."""
    if not (isinstance(gate_up, Tensor) and isinstance(down, Tensor)):
        return False
    wide, width = gate_up.shape[2], down.shape[2]
    return (
        gate_up.dtype == down.dtype == torch.bfloat16
        and wide % DEPTH == 0
        and down.shape[1] % COLUMNS == 0
        and width % (COLUMNS // 2) == 0
    )


def fewer_columns(columns: int) -> int:
    """Return about half of the columns of down, a multiple of what a cluster takes."""
    return cdiv(columns, 2 * COLUMNS) * COLUMNS


def chunk_up(x: Tensor, weight: Tensor, sort: ExpertSort, act: Tensor, *, top_k: int) -> None:
    """Compute gate, up and SiLU of every pair.

    Args:
        x: [C, K] normalised input of the MoE block.
        weight: [E, 2F, K] gate rows, then up rows.
        sort: From ``sort_by_expert``, by tiles of TILE_ROWS.
        act: [C * A, F], written in the order of ``sort.pairs``.
        top_k: Experts a token.
    """
    F, K = weight.shape[1] // 2, weight.shape[2]
    source = _source(sort, UP=1, A=top_k, F=F, K=K, PER_TILE=F // (COLUMNS // 2))
    _launch(source, x, weight, act, sort, 0)


def chunk_down(act: Tensor, weight: Tensor, sort: ExpertSort, terms: Tensor, first_column: int = 0) -> None:
    """Compute down of every pair, times its routing weight.

    Args:
        act: [C * A, F] from ``chunk_up``.
        weight: [E, N, F].
        sort: Likewise.
        terms: [C * A, W], written by token, then ascending by expert id: W columns of the N, a multiple of
            COLUMNS.
        first_column: Of the W.
    """
    N, F = weight.shape[1:]
    source = _source(sort, UP=0, N=N, K=F, PER_TILE=terms.shape[1] // COLUMNS)
    _launch(source, act, weight, terms, sort, first_column)


def _source(sort: ExpertSort, **constants: int) -> Source:
    return Source.of("prompt_experts", CLUSTER=CLUSTER, MAX_TILES=sort.tiles.shape[1], **constants)


def _launch(source: Source, x: Tensor, weight: Tensor, out: Tensor, sort: ExpertSort, left: int) -> None:
    stage = (TILE_ROWS // CLUSTER + COLUMNS) * DEPTH * 2
    launch_kernel(
        source,
        max(1, multiprocessors(x.device) // CLUSTER) * CLUSTER,
        THREADS,
        # Places in both programs of a cluster are the same, whole multiples of 1,024 bytes apart.
        STAGES * stage + 2 * 1024 - 64,
        (
            x,
            row_map(weight.view(-1, weight.shape[2])),
            out,
            sort.weights,
            sort.pairs,
            sort.tiles,
            sort.num_tiles,
            left,
        ),
        Launch(1),
    )
