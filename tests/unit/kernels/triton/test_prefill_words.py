"""Tiles decoded a word at a time are the decoded weight's to the bit, in every format and order of codes."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; it comes with PyTorch's CUDA builds")

from lean_laguna.engine.gpu_packed import in_lane_order, to_kernels
from lean_laguna.kernels.triton.prefill_words import decode_linear, takes_words
from lean_laguna.quant.codec import encode, to_packed
from lean_laguna.quant.packed import bank
from lean_laguna.quant.scheme import FP8_BLOCK, FP8_CHANNEL, NVFP4, packed_integer

E, N, K, COLS, BLOCK_K = 2, 64, 1024, 32, 128
SCHEMES = {
    "nvfp4": NVFP4,
    "fp8 rows": FP8_CHANNEL,
    "fp8 blocks": FP8_BLOCK,
    "int4 groups": packed_integer(4, 32),
    "int8 rows": packed_integer(8, None),
}


@pytest.mark.parametrize("order", ["rows", "lanes", "pairs"])
@pytest.mark.parametrize("name", SCHEMES)
def test_tiles_are_the_decoded_weights(draw, poisoned, device, name, order):
    scheme, dtype = SCHEMES[name], torch.bfloat16 if device == "cuda" else torch.float16
    weights = [draw(N, K, of=torch.float32) * 0.01**e for e in range(E)]
    packed = bank([to_packed(encode(w, scheme), scheme, (N, K)).to(device) for w in weights])
    expected = packed.decode(dtype)
    if order != "rows":
        packed = in_lane_order(packed, pairs=order == "pairs")
        if packed.order == "rows":  # float32 scales that the order's kernels would round
            scales = packed.scales.bfloat16().clamp(max=64.0)
            packed = dataclasses.replace(packed, scales=scales)
            expected = packed.decode(dtype)
            packed = in_lane_order(packed, pairs=order == "pairs")
        is_bytes = name.startswith("fp8") and order == "lanes"
        is_paired = order == "pairs" and scheme.num_bits == 4
        assert packed.order == ("bytes" if is_bytes else "pairs" if is_paired else "lanes")
    weight = to_kernels(packed, dtype)
    assert takes_words(weight, COLS, BLOCK_K)
    flat = dataclasses.replace(weight, shape=(E * N, K))
    found = poisoned(E * N * K + 8, of=dtype)
    assert torch.equal(decode_linear(flat, found), expected.flatten(0, 1))
    assert found[E * N * K :].isnan().all()


def test_odd_shapes_and_zero_points_are_left_to_others(draw):
    def packed(scheme, rows, columns):
        weight = draw(rows, columns, of=torch.float32)
        return to_kernels(to_packed(encode(weight, scheme), scheme, (rows, columns)), torch.float16)

    assert takes_words(packed(NVFP4, 32, 256), 32, 128)
    assert not takes_words(packed(NVFP4, 32, 192), 32, 128)
    assert not takes_words(packed(NVFP4, 48, 256), 32, 128)
    assert not takes_words(packed(packed_integer(4, 32, symmetric=False), 32, 256), 32, 128)
    assert not takes_words(draw(32, 256), 32, 128)
