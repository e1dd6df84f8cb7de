"""The layers of a DFlash drafter: their weights, and the two ways to run them.

``run`` is the served path: packed rows against the paged context, in place. ``dense`` is the differentiable
path; which keys a block row sees is the caller's business there.

Source: z-lab dflash 0.1.0 model.py; with Laguna's output gate and context norm, vLLM 0.33 laguna_dflash.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lean_laguna.core.drafter_config import DFlashConfig
from lean_laguna.kernels import dispatch
from lean_laguna.kernels.draft_attention import BlockPlan, block_attention
from lean_laguna.models.packing import pack_rows


@dataclass(frozen=True)
class Rotation:
    """Cos and sin of packed rows.

    Attributes:
        cos: [T, 1, R].
        signed_sin: [T, 1, R], negated in its first half.
    """

    cos: Tensor
    signed_sin: Tensor

    @classmethod
    def of(cls, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Rotation:
        """Build from cos and sin [T, R] float32."""
        half = cos.shape[-1] // 2
        signed = torch.cat((-sin[:, :half], sin[:, half:]), dim=-1)
        return cls(cos.unsqueeze(-2).to(dtype), signed.unsqueeze(-2).to(dtype))

    def apply_(self, rows: Tensor) -> Tensor:
        """Rotate [T, heads, P] in place."""
        return dispatch.rotate_(rows, self.cos, self.signed_sin)


class DFlashAttention(nn.Module):
    """Attention of one draft layer, q, k and v in one weight."""

    def __init__(self, config: DFlashConfig):
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.eps = config.head_dim, config.rms_norm_eps
        self.q_size = self.num_heads * self.head_dim
        self.kv_size = self.num_kv_heads * self.head_dim
        width = config.hidden_size
        self.qkv_proj = nn.Linear(width, self.q_size + 2 * self.kv_size, bias=False)
        self.o_proj = nn.Linear(self.q_size, width, bias=False)
        self.q_norm = nn.Parameter(torch.ones(self.head_dim))
        self.k_norm = nn.Parameter(torch.ones(self.head_dim))
        gates = {"per-head": self.num_heads, "per-element": self.q_size, "off": 0}[config.gating]
        self.g_proj = nn.Linear(width, gates, bias=False) if gates else None
        self._packed: Tensor | None = None

    def pack(self, packed: bool) -> None:
        """Join the input projections for the served path, or forget that they are joined."""
        self._packed = None
        if packed:
            weights = [self.qkv_proj.weight] + ([] if self.g_proj is None else [self.g_proj.weight])
            self._packed = pack_rows(weights)
            pack_rows([self.o_proj.weight])

    @property
    def packed(self) -> Tensor:
        """The joint weight of q, k, v and gate, [N, D]; ``pack`` comes first."""
        assert self._packed is not None, "pack() comes first"
        return self._packed

    def kv_weight(self) -> Tensor:
        """Return the [2JP, D] rows of the projection that make k and v."""
        return self.qkv_proj.weight[self.q_size :]

    def run(self, normed: Tensor, rotation: Rotation, kv: Tensor, plan: BlockPlan) -> Tensor:
        """Attend from packed block rows to their context and block.

        Args:
            normed: [T, D] after input_layernorm.
            rotation: Of the rows.
            kv: The layer's context storage [num_blocks, kv_block_size, 2, J, P]; only read.
            plan: Who sees what.

        Returns:
            [T, D].
        """
        heads, both = self.num_heads, self.num_heads + self.num_kv_heads
        joint = dispatch.linear(normed, self.packed)
        qk = joint[:, : self.q_size + self.kv_size].view(-1, both, self.head_dim)
        dispatch.rms_scale_(qk, self.eps)
        q = qk[:, :heads].mul_(self.q_norm)
        qk[:, heads:].mul_(self.k_norm)
        rotation.apply_(qk)
        end = self.q_size + 2 * self.kv_size
        own = joint[:, self.q_size : end].view(-1, 2, self.num_kv_heads, self.head_dim)
        out = block_attention(q, own, kv, plan, self.head_dim**-0.5)
        if self.g_proj is not None:
            out.mul_(dispatch.softplus(joint[:, end:]).reshape(out.shape[0], heads, -1))
        return dispatch.linear(out.view(-1, self.q_size), self.o_proj.weight)

    def dense(self, normed: Tensor, cos: Tensor, sin: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """Attend over blocks, differentiably.

        Args:
            normed: [N, Q, D].
            cos: [N, Q, 1, R].
            sin: The same.
            attend: From q [N, Q, H, P], k and v [N, Q, J, P] of the block rows to [N, Q, H, P].

        Returns:
            [N, Q, D].
        """
        sizes = [self.q_size, self.kv_size, self.kv_size]
        parts = F.linear(normed, self.qkv_proj.weight).split(sizes, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        q = _rotate(norm(q, self.q_norm, self.eps), cos, sin).to(v.dtype)
        k = _rotate(norm(k, self.k_norm, self.eps), cos, sin).to(v.dtype)
        out = attend(q, k, v)
        if self.g_proj is not None:
            gate = F.softplus(F.linear(normed, self.g_proj.weight).float()).to(out.dtype)
            out = out * gate.unflatten(-1, (self.num_heads, -1))
        return F.linear(out.flatten(-2), self.o_proj.weight)


class DFlashLayer(nn.Module):
    """One pre-norm draft layer: attention and a gated feed-forward, gate and up in one weight."""

    def __init__(self, config: DFlashConfig):
        super().__init__()
        self.eps = config.rms_norm_eps
        self.norm_context = config.norm_context
        self.input_layernorm = nn.Parameter(torch.ones(config.hidden_size))
        self.self_attn = DFlashAttention(config)
        self.post_attention_layernorm = nn.Parameter(torch.ones(config.hidden_size))
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def pack(self, packed: bool) -> None:
        """Lay weights out for the served path, or forget the layout."""
        self.self_attn.pack(packed)
        if packed:
            pack_rows([self.gate_up_proj.weight])
            pack_rows([self.down_proj.weight])

    def run(self, residual: Tensor, rotation: Rotation, kv: Tensor, plan: BlockPlan) -> None:
        """Advance the residual stream [T, D] of packed block rows, in place."""
        normed = dispatch.rms_norm(residual, self.input_layernorm, self.eps)
        residual.add_(self.self_attn.run(normed, rotation, kv, plan))
        normed = dispatch.rms_norm(residual, self.post_attention_layernorm, self.eps)
        inner = dispatch.silu_and_mul(dispatch.linear(normed, self.gate_up_proj.weight))
        residual.add_(dispatch.linear(inner, self.down_proj.weight))

    def dense(self, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """Run the layer over blocks [N, Q, D], differentiably; see ``DFlashAttention.dense``."""
        normed = norm(hidden, self.input_layernorm, self.eps)
        hidden = hidden + self.self_attn.dense(normed, cos, sin, attend)
        normed = norm(hidden, self.post_attention_layernorm, self.eps)
        gate, up = F.linear(normed, self.gate_up_proj.weight).chunk(2, dim=-1)
        return hidden + F.linear(F.silu(gate) * up, self.down_proj.weight)

    def dense_context_kv(self, context: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Project context features to rotated k and to v, differentiably.

        Args:
            context: [S, D] from ``DFlashDrafter.context_features``.
            cos: [S, 1, R].
            sin: The same.

        Returns:
            k [S, J, P], v [S, J, P].
        """
        attn = self.self_attn
        rows = norm(context, self.input_layernorm, self.eps) if self.norm_context else context
        k, v = (
            F.linear(rows, attn.kv_weight()).unflatten(-1, (2, attn.num_kv_heads, attn.head_dim)).unbind(-3)
        )
        return _rotate(norm(k, attn.k_norm, attn.eps), cos, sin).to(v.dtype), v


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMSNorm of x [..., D], differentiably: float32 inside, cast, times the weight [D]."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rotary = cos.shape[-1]
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    part = x[..., :rotary]
    first, second = part.chunk(2, dim=-1)
    rotated = part * cos + torch.cat((-second, first), dim=-1) * sin
    return rotated if rotary == x.shape[-1] else torch.cat((rotated, x[..., rotary:]), dim=-1)
