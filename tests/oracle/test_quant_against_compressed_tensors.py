"""Our codes and scales against compressed-tensors', byte for byte, and each way back."""

from __future__ import annotations

import pytest
import torch

from lean_laguna.quant import codec
from lean_laguna.quant.scheme import (
    FP8_BLOCK,
    FP8_CHANNEL,
    INT8_CHANNEL,
    NVFP4,
    WeightScheme,
    packed_integer,
)
from support.compressed import awkward_weights, their_tensors, their_weight

pytestmark = pytest.mark.oracle
pytest.importorskip("compressed_tensors")

SCHEMES = {
    "nvfp4": NVFP4,
    "fp8 block": FP8_BLOCK,
    "fp8 channel": FP8_CHANNEL,
    "fp8 tensor": WeightScheme("fp8", 8, "tensor", "naive-quantized"),
    "int8 channel": INT8_CHANNEL,
    "int8 group 32": packed_integer(8, 32),
    "int4 group 32": packed_integer(4, 32),
    "int4 row": packed_integer(4, None),
    "int4 group 32 asymmetric": packed_integer(4, 32, symmetric=False),
    "int8 row asymmetric": packed_integer(8, None, symmetric=False),
    "int4 tensor": WeightScheme("int", 4, "tensor", "pack-quantized"),
}
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty(tensor.shape).copy_(tensor).view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_every_byte_is_theirs(scheme: WeightScheme, dtype: torch.dtype) -> None:
    for kind, weight in awkward_weights(72, 192, dtype).items():
        ours, theirs = codec.encode(weight, scheme), their_tensors(weight, scheme)
        assert ours.keys() == theirs.keys()
        for name, expected in theirs.items():
            assert ours[name].dtype == expected.dtype, (kind, name)
            assert ours[name].shape == expected.shape, (kind, name)
            differing = int((raw(ours[name]) != raw(expected)).sum())
            assert differing == 0, f"{kind}: {differing} bytes of {name} differ"


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_their_checkpoints_decode_to_their_weights(scheme: WeightScheme) -> None:
    for kind, weight in awkward_weights(72, 192, torch.bfloat16, seed=1).items():
        theirs = their_tensors(weight, scheme)
        packed = codec.to_packed(theirs, scheme, (72, 192))
        decoded, expected = packed.decode(torch.bfloat16), their_weight(theirs, scheme)
        # Weights near the dtype's largest overflow an asymmetric range, theirs as ours.
        assert torch.allclose(decoded, expected.bfloat16(), rtol=0, atol=0, equal_nan=True), kind


def test_a_shared_divisor_is_that_of_the_largest_of_the_set() -> None:
    gate, up = torch.randn(32, 64).bfloat16(), 7 * torch.randn(32, 64).bfloat16()
    largest = torch.maximum(gate.abs().amax(), up.abs().amax())
    ours, theirs = codec.encode(gate, NVFP4, largest), their_tensors(gate, NVFP4, largest)
    for name, expected in theirs.items():
        assert torch.equal(raw(ours[name]), raw(expected)), name
    assert torch.equal(ours["weight_global_scale"], codec.encode(up, NVFP4)["weight_global_scale"])
