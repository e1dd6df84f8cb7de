"""Activations, norms and rotation, each row's bits independent of the other rows.

The hazard on a CPU: torch runs the body of a contiguous array through vector code and the last few elements
through scalar code, and the two round transcendental functions differently. Which element is "last" depends
on how many rows there are. So a transcendental function here always runs over rows that torch cannot merge
into one long array (``_unmerged``), in calls too small to be cut up between threads (``MAX_ELEMENTS``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

# at::internal::GRAIN_SIZE: torch splits an elementwise call between threads from this many elements on.
MAX_ELEMENTS = 32768 - 1
# Two vectors of sixteen floats: what torch's vector loop takes at a time.
_VECTOR_STEP = 32
# Four vectors of sixteen floats, what torch's sum over an outer dimension takes at a time, and the terms from
# which on it keeps partial sums.
_SUM_STEP, _MAX_ORDERED_TERMS = 64, 16


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last dimension by its root mean square: float32 inside, cast, then times the weight.

    Args:
        x: [..., D].
        weight: [D].
        eps: Added to the mean square.

    Returns:
        A new tensor like ``x``.

    Source: transformers, LagunaRMSNorm.
    """
    return rms_scale(x, eps).mul_(weight)


def rms_scale(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x²) + eps) over the last dimension, computed in float32."""
    wide = x.float()
    return (wide * _inverse_rms(wide, eps)).to(x.dtype)


def rms_scale_(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Do what ``rms_scale`` does, in place; ``x`` may be a strided view."""
    if x.dtype != torch.float32:
        return x.copy_(rms_scale(x, eps))
    return x.mul_(_inverse_rms(x, eps))


def _inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    # Single multiplications and additions only: torch may or may not fuse addcmul's two roundings into one,
    # by element.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    inverse: torch.Tensor = norm.mul_(norm).mul_(scalar(1.0 / x.shape[-1])).add_(scalar(eps)).rsqrt_()
    return inverse


@functools.cache
def scalar(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a number as a CPU tensor; torch wraps a Python number anew in each call, at some cost."""
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=dtype)


def add_up(terms: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Sum over the second dimension in its order, an exact zero changing nothing wherever it stands.

    Args:
        terms: [B, S, C].
        out: [B, C]; changed.

    Returns:
        ``out``.
    """
    # torch adds up in order where all columns go through its widest loop and no partial sums are kept.
    if terms.shape[1] <= _MAX_ORDERED_TERMS and terms.shape[2] % _SUM_STEP == 0:
        return torch.sum(terms, 1, out=out)
    first, *others = terms.unbind(1)
    out.copy_(first)
    for term in others:
        out.add_(term)
    return out


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up.

    Args:
        gate_up: [..., 2F], gate first.

    Returns:
        [..., F].
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return by_rows(F.silu, gate).mul_(up)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """Softplus of each element, computed in float32; linear above 20, as torch has it."""
    return by_rows(F.softplus, x) if x.dtype == torch.float32 else by_rows(F.softplus, x.float()).to(x.dtype)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Sigmoid of each element."""
    return by_rows(torch.sigmoid, x)


def softcap(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Return tanh(x / cap) * cap."""
    return by_rows(torch.tanh, x / cap) * cap


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first R dimensions of each head by halves; the rest pass through.

    Args:
        x: [T, H, P].
        cos: [T, R].
        sin: [T, R].

    Returns:
        A new tensor [T, H, P].
    """
    half = cos.shape[-1] // 2
    signed = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)
    return rotate_(x.clone(), cos.unsqueeze(-2), signed.unsqueeze(-2))


def rotate_(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotate in place.

    Args:
        x: [T, H, P]; changed.
        cos: [T, 1, R].
        signed_sin: [T, 1, R]: the sine, negated in its first half.

    Returns:
        ``x``.
    """
    rotary = cos.shape[-1]
    part = x if rotary == x.shape[-1] else x[..., :rotary]
    swapped = torch.roll(part, rotary // 2, -1).mul_(signed_sin)
    part.mul_(cos).add_(swapped)
    return x


def by_rows(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Apply an elementwise function so that an element's bits depend on its column and value only.

    Args:
        function: Elementwise, out of place.
        x: [T, ...].

    Returns:
        A new tensor shaped like ``x``.
    """
    if not x.is_cpu:
        return function(x)
    if x.numel() <= MAX_ELEMENTS:
        return function(_unmerged(x))
    rows = max(1, MAX_ELEMENTS * x.shape[0] // x.numel())
    if x[0].numel() > MAX_ELEMENTS:
        flat = x.reshape(x.shape[0], -1)
        return torch.cat(
            [function(_unmerged(part)) for part in flat.split(MAX_ELEMENTS // 64 * 64, 1)], 1
        ).view(x.shape)
    return torch.cat([function(_unmerged(part)) for part in x.split(rows)])


def _unmerged(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` laid out so that torch loops over its rows one by one, or in whole vectors throughout."""
    width = x.shape[-1]
    if width % _VECTOR_STEP == 0 or x.stride(-2) != width or x.dim() < 2:
        return x
    return F.pad(x, (0, 1))[..., :width]
