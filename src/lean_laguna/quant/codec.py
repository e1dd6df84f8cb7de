"""One weight to the tensors of a checkpoint and back, by scheme."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lean_laguna.quant import fp8, integer, nvfp4
from lean_laguna.quant.packed import PackedWeight
from lean_laguna.quant.scheme import WeightScheme
from lean_laguna.quant.scratch import Scratch


def encode(
    weight: Tensor, scheme: WeightScheme, largest: Tensor | None = None, scratch: Scratch | None = None
) -> dict[str, Tensor]:
    """Quantise a weight [N, K] into a checkpoint's tensors, by the last part of their names.

    Args:
        weight: bfloat16, float16 or float32, finite, contiguous.
        scheme: Spelt as compressed-tensors spells it.
        largest: Largest magnitude over the linears that share an NVFP4 divisor; None for this one alone.
        scratch: The thread's, where there are many weights.

    Raises:
        ConfigError: The weight's shape does not fit the scheme.
    """
    scheme.scale_shape(*weight.shape)
    if scheme.number == "fp4":
        divisor = nvfp4.global_scale(weight.abs().amax() if largest is None else largest)
        codes, scales = nvfp4.encode(weight, divisor, scratch)
        return {"weight_packed": codes, "weight_scale": scales, "weight_global_scale": divisor}
    if scheme.number == "fp8":
        codes, scales = fp8.encode(weight, scheme, scratch)
        return {"weight": codes, "weight_scale": scales}
    codes, scales, zero = integer.encode(weight, scheme, scratch)
    if scheme.storage != "pack-quantized":
        tensors = {"weight": codes, "weight_scale": scales}
        return tensors if zero is None else tensors | {"weight_zero_point": zero}
    tensors = {"weight_packed": integer.pack(codes, scheme.num_bits), "weight_scale": scales}
    if zero is not None:
        is_packed = scheme.strategy != "tensor"
        tensors["weight_zero_point"] = integer.pack_zero_points(zero, scheme.num_bits) if is_packed else zero
    return tensors | {"weight_shape": torch.tensor(weight.shape)}


def to_packed(tensors: Mapping[str, Tensor], scheme: WeightScheme, shape: tuple[int, int]) -> PackedWeight:
    """Return a checkpoint's tensors of one weight [N, K] as kept in memory, without copying codes.

    Args:
        tensors: By the last part of their names, in the scheme's spelling and shapes.
        scheme: How they are stored.
        shape: (N, K).
    """
    rows, columns = shape
    codes = tensors["weight_packed" if "weight_packed" in tensors else "weight"]
    found = tensors["weight_scale_inv" if "weight_scale_inv" in tensors else "weight_scale"]
    scales = found.reshape(scheme.scale_shape(rows, columns)).reshape(-1, _tiles_across(scheme, columns))
    if scheme.number == "fp4":
        inverse = tensors.get("weight_scale_2")
        divisor = tensors["weight_global_scale"] if inverse is None else 1.0 / inverse.float()
        return PackedWeight(scheme, shape, codes, scales, divisor.float().reshape(1))
    if scheme.number == "fp8":
        return PackedWeight(scheme, shape, codes, scales)
    bits, zero = scheme.num_bits, tensors.get("weight_zero_point")
    if scheme.storage == "pack-quantized":
        codes = integer.word_bytes(codes, bits, columns).contiguous()
        if zero is not None and zero.dtype == torch.int32:
            zero = integer.unpack_zero_points(zero, bits, rows)
    else:
        codes = integer.to_bytes(codes, bits)
    return PackedWeight(
        scheme,
        shape,
        codes,
        scales,
        zero_points=None if zero is None else zero.reshape(scales.shape),
        column_groups=tensors.get("weight_g_idx"),
    )


def _tiles_across(scheme: WeightScheme, columns: int) -> int:
    return 1 if scheme.strategy == "tensor" else scheme.scale_shape(1, columns)[1]
