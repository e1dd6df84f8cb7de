"""Attention of whole blocks of a prompt in CUDA C++, on Hopper: from raw queries to gated heads."""

from __future__ import annotations

import torch
from torch import Tensor

from lean_laguna.kernels.cuda.compiler import Source
from lean_laguna.kernels.cuda.driver import multiprocessors
from lean_laguna.kernels.cuda.launching import launch_kernel
from lean_laguna.kernels.triton.attention import AttentionShape
from lean_laguna.kernels.triton.launch import Launch, cdiv
from lean_laguna.kernels.triton.prefill_images import IMAGE_KEYS

THREADS = 384
HEAD_DIM = 128
STAGES = 2
"""Images of keys, and of values, that are there or on their way."""
CLUSTER = 2
"""Programs that ask for images together, of heads that share them, where these come in such numbers."""


def has_warpgroups(device: torch.device) -> bool:
    """Say whether a device multiplies four warps at a time: Hopper does, and no other."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9


def fits_prompts(shape: AttentionShape, block: int) -> bool:
    """Say whether ``attend_block`` takes a layer's shape, and blocks of so many tokens."""
    return (
        shape.head_dim == HEAD_DIM
        # Elements are loaded by eights, and rows of q, k, v and gates lie one after another.
        and shape.width % 8 == 0
        and shape.rotary_dim in (64, 128)
        and shape.num_heads % shape.num_kv_heads == 0
        and shape.window % IMAGE_KEYS == 0
        and block % IMAGE_KEYS == 0
    )


def attend_block(
    qkv: Tensor,
    out: Tensor,
    q_norm: Tensor,
    rotary: tuple[Tensor, Tensor],
    images: tuple[Tensor, Tensor],
    shape: AttentionShape,
    first: Tensor,
    num_tokens: Tensor,
    *,
    eps: float,
) -> None:
    """Attend from a block's queries to all keys up to their own, or to those in their window; apply the gate.

    Args:
        qkv: [C, shape.width] bf16: queries as projected, and gates.
        out: [C, H * P], written for the block's tokens.
        q_norm: [P] weight of the query norm; anything where the shape has none.
        rotary: cos and sin, [max_model_len, rotary_dim / 2] each.
        images: Of keys and values, from ``lay_images``.
        shape: Of this layer; causal.
        first: [1] int32, position of the block's first token, a multiple of IMAGE_KEYS.
        num_tokens: [1] int32, tokens of the block.
        eps: Of the query norm.
    """
    p, heads = shape.head_dim, shape.num_heads
    cluster = CLUSTER if heads // shape.num_kv_heads % CLUSTER == 0 else 1
    source = Source.of(
        "prompt_attention",
        H=heads,
        J=shape.num_kv_heads,
        P=p,
        ROTARY=shape.rotary_dim,
        WINDOW=shape.window,
        QK_NORM=shape.has_qk_norm,
        GATE=shape.has_gate,
        CLUSTER=cluster,
    )
    stages = 2 * STAGES * IMAGE_KEYS * p * 2
    launch_kernel(
        source,
        max(1, min(multiprocessors(qkv.device), cdiv(qkv.shape[0], IMAGE_KEYS) * heads) // cluster) * cluster,
        THREADS,
        # Places in all programs of a cluster are the same, whole multiples of 1,024 bytes apart.
        stages + 2 * 1024 - 64,
        (
            qkv,
            out,
            q_norm,
            *rotary,
            *images,
            first,
            num_tokens,
            float(eps),
            p**-0.5 * 1.4426950408889634,
        ),
        Launch(1),
    )
