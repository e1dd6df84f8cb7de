"""Rotary embeddings: default and YaRN frequencies, and cos and sin of positions.

Source: transformers' modeling_rope_utils (``_compute_yarn_parameters``) and LagunaRotaryEmbedding. An
explicit ``attention_factor`` is the final factor on cos and sin; it replaces YaRN's formula.
"""

from __future__ import annotations

import math

import torch

from lean_laguna.core.rope_config import RopeConfig

# Positions per piece of a table. Pieces have one size, so that a position's bits do not depend on how far the
# table has grown.
_PIECE = 1024


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Return the angle per position of each rotating pair, [R / 2] float32."""
    rotary = rope.rotary_dim(head_dim)
    periods = rope.rope_theta ** (torch.arange(0, rotary, 2, dtype=torch.float32, device="cpu") / rotary)
    kept = 1.0 / periods
    if rope.rope_type != "yarn":
        return kept
    low, high = _ramp_ends(rope, rotary)
    ramp = torch.clamp(
        (torch.arange(rotary // 2, dtype=torch.float32, device="cpu") - low) / (high - low), 0, 1
    )
    # transformers' order of operations, so that float32 rounds alike.
    share_kept = 1 - ramp
    return 1.0 / (rope.factor * periods) * (1 - share_kept) + kept * share_kept


def _ramp_ends(rope: RopeConfig, rotary: int) -> tuple[float, float]:
    def dimension(rotations: float) -> float:
        original = rope.original_max_position_embeddings
        assert original is not None, "RopeConfig checks it for yarn"
        return rotary * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.rope_theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary - 1)
    return low, high + 0.001 if low == high else high


class RotaryEmbedding:
    """Cos and sin of positions, from a table that grows as needed on a CPU and directly elsewhere.

    Not a module: it holds nothing that is learned or saved.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, max_positions: int):
        self.rotary_dim = rope.rotary_dim(head_dim)
        self.max_positions = max_positions
        self._inverse = inverse_frequencies(rope, head_dim)
        self._scaling = rope.attention_scaling
        self._inverse_on: dict[torch.device, torch.Tensor] = {}
        self._table = torch.empty(0, 3, self.rotary_dim, device="cpu")

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin, each [..., R] float32, of integer positions [...]."""
        if positions.device.type != "cpu" or torch.is_grad_enabled():
            return self.compute(positions)
        rows = self.table(int(positions.max()) + 1 if positions.numel() else 0)[positions]
        return rows[..., 0, :], rows[..., 1, :]

    def turns(self, positions: torch.Tensor, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and signed sin, each [T, 1, R] float32, as ``kernels.dispatch.rotate_`` takes them.

        Args:
            positions: [T], all below ``num_positions``.
            num_positions: Spares the search for the largest.
        """
        if positions.device.type != "cpu":
            cos, sin = self.compute(positions)
            return cos.unsqueeze(1), _signed(sin).unsqueeze(1)
        rows = self.table(num_positions).index_select(0, positions)
        return rows[:, 0:1], rows[:, 2:3]

    def turns_from(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``turns`` of consecutive positions on a CPU, [count, 1, R] each, views of the table."""
        rows = self.table(first + count)[first : first + count]
        return rows[:, 0:1], rows[:, 2:3]

    def compute(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin of positions [...], each [..., R] float32, without a table."""
        angles = positions[..., None].float() * self.inverse_on(positions.device)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self._scaling, angles.sin() * self._scaling

    def inverse_on(self, device: torch.device) -> torch.Tensor:
        """Return the frequencies on a device, [R / 2] float32."""
        if device not in self._inverse_on:
            self._inverse_on[device] = self._inverse.to(device)
        return self._inverse_on[device]

    def table(self, num_positions: int) -> torch.Tensor:
        """Return cos, sin and signed sin from position 0 on, [N, 3, R] float32, N >= ``num_positions``."""
        while self._table.shape[0] < num_positions:
            first = self._table.shape[0]
            pieces = [
                self._piece(at)
                for at in range(first, max(num_positions, min(2 * first, self.max_positions)), _PIECE)
            ]
            self._table = torch.cat((self._table, *pieces))
        return self._table

    def _piece(self, first: int) -> torch.Tensor:
        with torch.inference_mode(False), torch.no_grad():
            cos, sin = self.compute(torch.arange(first, first + _PIECE, device="cpu"))
            return torch.stack((cos, sin, _signed(sin)), dim=1)


def _signed(sin: torch.Tensor) -> torch.Tensor:
    """Negate the first half of [.., R]: what the other half of a pair is multiplied by."""
    half = sin.shape[-1] // 2
    return torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
