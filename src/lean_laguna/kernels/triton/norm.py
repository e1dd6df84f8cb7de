"""Embedding rows and stand-alone RMSNorm: where no product follows that could normalise on its way.

Source: Hugging Face transformers 5.24, modeling_laguna.py, LagunaRMSNorm (rounds before the weight and
after).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lean_laguna.kernels.triton.launch import Launch, power_of_two
from lean_laguna.kernels.triton.primitives import normalise, wait_for_inputs, wait_with_rows


@triton.jit
def _embed_kernel(
    ids_ptr,
    num_rows_ptr,
    table_ptr,
    out_ptr,
    clock_ptr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    CLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(PDL, False)
    if CLOCK:
        tl.store(clock_ptr, tl.extra.cuda.globaltimer(), mask=row + tl.program_id(1) == 0)
    if row < tl.load(num_rows_ptr):
        token = tl.load(ids_ptr + row).to(tl.int64)
        tl.store(out_ptr + row * D + d, tl.load(table_ptr + token * D + d, mask=d < D), mask=d < D)


def embed(
    input_ids: Tensor,
    table: Tensor,
    out: Tensor,
    num_rows: Tensor,
    launch: Launch,
    *,
    clock: Tensor | None = None,
) -> None:
    """Copy the embedding of each live row.

    Args:
        input_ids: [MAX_ROWS] int32.
        table: [V, D].
        out: [MAX_ROWS, D], written; dead rows keep what they hold.
        num_rows: [1] int32, live rows.
        launch: What the launches of a step share.
        clock: [1] int64, or None: written with the nanosecond at which this began; on a GPU only.
    """
    D = table.shape[1]
    block = min(1024, power_of_two(D))
    _embed_kernel[(launch.cols, triton.cdiv(D, block))](
        input_ids,
        num_rows,
        table,
        out,
        num_rows if clock is None else clock,
        D=D,
        BLOCK=block,
        CLOCK=clock is not None and clock.is_cuda,
        PDL=launch.pdl,
        **launch.options(4),
    )


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows_ptr,
    eps,
    M: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    part = tl.program_id(1)
    d = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + part * D + d, mask=d < D, other=0.0)
    if row < wait_with_rows(num_rows_ptr, PDL, True):
        at = (row * M + part) * D + d
        x = tl.load(x_ptr + at, mask=d < D, other=0.0)
        wide = x.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(wide * wide, 0) / D + eps)
        tl.store(out_ptr + at, normalise(x, inverse, weight), mask=d < D)


def rms_norm(x: Tensor, weight: Tensor, out: Tensor, num_rows: Tensor, eps: float, launch: Launch) -> None:
    """Normalise each live row, or each of its M parts with that part's own weight.

    Args:
        x: [MAX_ROWS, D] or [MAX_ROWS, M, D].
        weight: [D] or [M, D].
        out: Shape of x, written.
        num_rows: [1] int32, live rows.
        eps: Added to the mean square.
        launch: What the launches of a step share.
    """
    D, parts = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    _rms_norm_kernel[(launch.cols, parts)](
        x,
        weight,
        out,
        num_rows,
        eps,
        M=parts,
        D=D,
        BLOCK=power_of_two(D),
        PDL=launch.pdl,
        **launch.options(4),
    )
