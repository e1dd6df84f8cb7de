"""Attention over whole packed sequences: differentiable, for training and for scoring.

Not the served path (``kernels.attention``): its bits depend on the sequence's length and on the batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Backend = Literal["auto", "sdpa", "flex"]


def make_attend(
    positions: torch.Tensor, document_ids: torch.Tensor | None, window: int | None, backend: Backend = "auto"
) -> Attend:
    """Return causal attention within documents and within the window.

    Args:
        positions: [B, S] positions within the document.
        document_ids: [B, S]; rows see their own document only. None: one document per sequence.
        window: Keys a row sees, itself included; None sees all.
        backend: ``sdpa`` with a mask, ``flex`` (a GPU only), or ``auto``: flex on a GPU.

    Returns:
        A function from q [B, H, S, P], k and v [B, J, S, P] to [B, H, S, P].
    """
    if backend == "flex" or (backend == "auto" and positions.is_cuda):
        return _flex(positions, document_ids, window)
    return _sdpa(positions, document_ids, window)


def reset_positions(document_ids: torch.Tensor) -> torch.Tensor:
    """Return positions [B, S] that start at 0 with each document of ``document_ids`` [B, S]."""
    at = torch.arange(document_ids.shape[1], device=document_ids.device).expand_as(document_ids)
    begins = torch.ones_like(document_ids, dtype=torch.bool)
    begins[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return at - torch.cummax(torch.where(begins, at, 0), dim=1)[0]


def _sdpa(positions: torch.Tensor, document_ids: torch.Tensor | None, window: int | None) -> Attend:
    length = positions.shape[1]
    at = torch.arange(length, device=positions.device)
    seen = (at[:, None] >= at[None, :])[None]
    if window is not None:
        seen = seen & (positions[:, :, None] - positions[:, None, :] < window)
    if document_ids is not None:
        seen = seen & (document_ids[:, :, None] == document_ids[:, None, :])
    mask = None if window is None and document_ids is None else seen[:, None]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        # Keys repeated here: torch's masked GPU kernels have no grouped heads.
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)

    return attend


def _flex(positions: torch.Tensor, document_ids: torch.Tensor | None, window: int | None) -> Attend:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    batch, length = positions.shape

    def seen(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        visible = q >= k
        if window is not None:
            visible = visible & (positions[b, q] - positions[b, k] < window)
        if document_ids is not None:
            visible = visible & (document_ids[b, q] == document_ids[b, k])
        return visible

    block_mask = create_block_mask(seen, batch, None, length, length, device=positions.device)
    run: Any = flex_attention if torch.compiler.is_compiling() else _compiled_flex()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = run(q, k, v, block_mask=block_mask, enable_gqa=q.shape[1] != k.shape[1])
        return out

    return attend


@functools.cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)
