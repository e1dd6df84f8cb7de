"""The kernels in plain PyTorch: the oracle for every other implementation, and the path on a CPU.

Contract: a row's bits depend on that row, its keys and the weights; never on the number of rows, on their
order, or on the other rows.
"""

from lean_laguna.kernels.attention import paged_attention, store_kv
from lean_laguna.kernels.attention_plan import AttentionPlan, Tiles, plan_attention
from lean_laguna.kernels.elementwise import (
    apply_rotary,
    rms_norm,
    rms_scale,
    rms_scale_,
    rotate_,
    silu_and_mul,
    softplus,
)
from lean_laguna.kernels.linear import ROW_TILE, linear
from lean_laguna.kernels.moe import moe_experts, route

__all__ = [
    "ROW_TILE",
    "AttentionPlan",
    "Tiles",
    "apply_rotary",
    "linear",
    "moe_experts",
    "paged_attention",
    "plan_attention",
    "rms_norm",
    "rms_scale",
    "rms_scale_",
    "rotate_",
    "route",
    "silu_and_mul",
    "softplus",
    "store_kv",
]
