"""Packed weights: pieces, stacks and banks decode as their parts do."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lean_laguna.quant import packed as module
from lean_laguna.quant.codec import encode, to_packed
from lean_laguna.quant.packed import PackedWeight, bank, stack_rows
from lean_laguna.quant.scheme import FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, NVFP4, WeightScheme, packed_integer

SCHEMES = {
    "nvfp4": NVFP4,
    "block": dataclasses.replace(FP8_BLOCK, block=(16, 16)),
    "channel": FP8_CHANNEL,
    "tensor": dataclasses.replace(FP8_TENSOR, activations="none"),
    "int4": packed_integer(4, 16, symmetric=False),
    "int8": packed_integer(8, None),
}
EVERY = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)


def made(scheme: WeightScheme, rows: int, seed: int) -> PackedWeight:
    weight = (seed + 1) * torch.randn(rows, 48, generator=torch.Generator().manual_seed(seed))
    return to_packed(encode(weight, scheme), scheme, (rows, 48))


@EVERY
def test_pieces_are_the_whole(scheme: WeightScheme, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = made(scheme, 40, 0)
    whole = weight.decode()
    monkeypatch.setattr(module, "PIECE_ELEMENTS", 7 * 48)
    assert torch.equal(weight.decode(), whole)


@EVERY
def test_stacked_linears_keep_their_own_scales(scheme: WeightScheme) -> None:
    # 24 rows are no whole number of blocks: the second linear's blocks begin anew.
    gate, up = made(scheme, 24, 0), made(scheme, 24, 1)
    joint = stack_rows([gate, up])
    assert joint.shape == (48, 48)
    assert joint.heights == (24, 24)
    assert torch.equal(joint.decode(), torch.cat((gate.decode(), up.decode())))
    assert joint.num_bytes == gate.num_bytes + up.num_bytes


@EVERY
def test_a_bank_holds_its_experts(scheme: WeightScheme) -> None:
    experts = [stack_rows([made(scheme, 24, i), made(scheme, 24, i + 3)]) for i in range(3)]
    whole = bank(experts)
    assert whole.shape == (3, 48, 48)
    decoded = whole.decode()
    for i, expert in enumerate(experts):
        assert torch.equal(decoded[i], expert.decode())
        assert torch.equal(whole.expert(i).codes, expert.codes)
    assert torch.equal(whole.to("cpu").decode(), decoded)


def test_unlike_weights_are_not_joined() -> None:
    with pytest.raises(ValueError, match="beside"):
        stack_rows([made(NVFP4, 16, 0), made(FP8_CHANNEL, 16, 0)])
    with pytest.raises(ValueError, match="experts that differ"):
        bank([made(NVFP4, 16, 0), made(NVFP4, 32, 0)])
