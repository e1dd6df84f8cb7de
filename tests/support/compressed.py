"""compressed-tensors as an oracle: its own data-free quantiser for one weight, by scheme."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lean_laguna.quant.scheme import WeightScheme


def their_scheme(scheme: WeightScheme) -> Any:
    """Return a scheme as compressed-tensors' own object, read from what we write into configs."""
    from compressed_tensors.quantization import QuantizationScheme

    return QuantizationScheme(
        targets=["Linear"],
        weights=scheme.weights_json(),
        input_activations=scheme.activations_json(),
        format=scheme.storage,
    )


def their_tensors(weight: Tensor, scheme: WeightScheme, largest: Tensor | None = None) -> dict[str, Tensor]:
    """Quantise a weight [N, K] by compressed-tensors' functions, scales from the weights' extremes."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.utils import (
        calculate_qparams,
        generate_gparam,
        maybe_pad_tensor_for_block_quant,
    )

    theirs = their_scheme(scheme)
    args = theirs.weights
    divisor = None
    if scheme.number == "fp4":
        whole = weight.abs().amax() if largest is None else largest
        divisor = generate_gparam(-whole, whole)
    if scheme.strategy in ("group", "tensor_group"):
        tiles, dims = weight.unflatten(-1, (-1, args.group_size)), (-1,)
    elif scheme.strategy == "block":
        height, width = args.block_structure
        padded = maybe_pad_tensor_for_block_quant(weight, args.block_structure)
        tiles = padded.unflatten(-1, (-1, width)).unflatten(0, (-1, height))
        dims = (1, 3)
    elif scheme.strategy == "channel":
        tiles, dims = weight.unsqueeze(1), (-1,)
    else:
        tiles, dims = weight.reshape(1, -1), (-1,)
    scales, zero = calculate_qparams(tiles.amin(dims), tiles.amax(dims), args, global_scale=divisor)
    state = {"weight": weight, "weight_scale": scales.to(weight.dtype), "weight_zero_point": zero}
    if divisor is not None:
        state["weight_global_scale"] = divisor
    compressor = BaseCompressor.get_value_from_registry(scheme.storage)
    return dict(compressor.compress(state, theirs))


def their_weight(tensors: dict[str, Tensor], scheme: WeightScheme) -> Tensor:
    """Dequantise by compressed-tensors' own decompressor."""
    from compressed_tensors.compressors import BaseCompressor

    compressor = BaseCompressor.get_value_from_registry(scheme.storage)
    weight = compressor.decompress(dict(tensors), their_scheme(scheme))["weight"]
    assert isinstance(weight, Tensor)
    return weight


def awkward_weights(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """Return weights of every kind that can trip a quantiser, [rows, columns] each."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(rows, columns, generator=generator)
    most = torch.finfo(dtype).max
    spread = torch.exp2(torch.randint(-20, 14, (rows, columns), generator=generator).float())
    holes = normal.clone()
    holes[:, : columns // 2] = 0.0
    holes[rows // 2] = 0.0
    sparse = torch.where(torch.rand(rows, columns, generator=generator) < 0.9, 0.0, normal)
    ties = torch.randint(-24, 25, (rows, columns), generator=generator).float() / 4
    ties[:, ::16] = 6.0
    kinds = {
        "random": normal,
        "small": normal * 0.02,
        "tiny": normal * 1e-6 if dtype == torch.float16 else normal * 1e-30,
        "huge": (normal / normal.abs().amax()) * most,
        "subnormal": normal * torch.finfo(dtype).tiny / 8,
        "zero": torch.zeros(rows, columns),
        "negative zero": -torch.zeros(rows, columns),
        "spread": normal * spread,
        "holes": holes,
        "sparse": sparse,
        "ties": ties,
        "one value": torch.full((rows, columns), -0.37),
    }
    return {name: weight.to(dtype) for name, weight in kinds.items()}
