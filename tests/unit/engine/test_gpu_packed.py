"""Packed weights for the kernels: scales by row where they must be, linears side by side, codes by lane."""

import dataclasses

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="Triton is not installed; it comes with PyTorch's CUDA builds")

from lean_laguna.engine.gpu_packed import WeightStore, in_lane_order, to_kernels
from lean_laguna.kernels.triton.formats import Packed
from lean_laguna.quant.packed import stack_rows
from lean_laguna.quant.random_weight import random_weight
from lean_laguna.quant.scheme import FP8_BLOCK, FP8_TENSOR, NVFP4, packed_integer

BLOCK = dataclasses.replace(FP8_BLOCK, block=(16, 16))


def made(scheme, rows, columns=64, seed=0):
    return random_weight(scheme, (rows, columns), (rows,), 0.02, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("heights", "tall"), [((32, 16), 16), ((24, 16), 1)])
def test_blocks_that_do_not_fit_the_linears_become_rows(heights, tall):
    weight = stack_rows([made(BLOCK, rows, seed=rows) for rows in heights])
    found = to_kernels(weight, torch.float32)
    assert found.tall == tall
    assert found.scales.shape == (sum(heights) // tall, 4)
    by_row = found.scales.repeat_interleave(tall, 0).float()
    assert torch.equal(by_row, weight.row_scales())
    assert found.codes.data_ptr() == weight.codes.data_ptr()


def test_one_scale_for_a_linear_becomes_its_rows():
    weight = stack_rows(
        [made(dataclasses.replace(FP8_TENSOR, activations="none"), 8, seed=i) for i in (1, 2)]
    )
    assert torch.equal(to_kernels(weight, torch.float32).scales.float(), weight.row_scales())


def test_a_divisor_stands_beside_each_of_its_rows():
    weight = stack_rows([made(NVFP4, 8), made(NVFP4, 24)])
    assert weight.global_scales is not None
    weight.global_scales.copy_(torch.tensor([3.0, 5.0]))
    divisors = to_kernels(weight, torch.float32).divisors
    assert divisors is not None
    assert divisors.tolist() == [3.0] * 8 + [5.0] * 24


def test_codes_by_lane_decode_to_the_same_and_awkward_ones_stay():
    weight = made(NVFP4, 16, 1024)
    plain = weight.decode()
    for pairs, order in ((False, "lanes"), (True, "pairs"), (False, "lanes")):
        weight = in_lane_order(weight, pairs=pairs)
        assert weight.order == order
        assert torch.equal(weight.decode(), plain)
    assert in_lane_order(made(NVFP4, 16, 64)).order == "rows"
    assert in_lane_order(made(packed_integer(8, 64), 16, 512)).order == "lanes"
    eight = made(FP8_BLOCK, 16, 512)
    eight.scales.copy_(eight.scales.bfloat16())
    plain = eight.decode()
    for pairs, order in ((False, "bytes"), (True, "lanes")):
        eight = in_lane_order(eight, pairs=pairs)
        assert eight.order == order
        assert torch.equal(eight.decode(), plain)
    large = made(packed_integer(8, 64), 16, 512)
    large.scales.fill_(200.0)
    assert in_lane_order(large).order == "rows"


def test_a_store_lays_linears_side_by_side_and_says_what_it_decoded(capsys):
    module = nn.ModuleDict({name: nn.Linear(64, 8, bias=False) for name in "abc"})
    packed = {"a.weight": made(NVFP4, 8, seed=1), "b.weight": made(NVFP4, 8, seed=2)}
    values = [weight.decode() for weight in packed.values()]
    store = WeightStore(module, packed, torch.float32)
    joint = store.joint("a.weight", "b.weight")
    assert isinstance(joint, Packed)
    assert packed["b.weight"].codes.data_ptr() > packed["a.weight"].codes.data_ptr() == joint.codes.data_ptr()
    assert [torch.equal(packed[f"{n}.weight"].decode(), v) for n, v in zip("ab", values, strict=True)] == [
        True
    ] * 2
    store.tell()
    assert not capsys.readouterr().err
    mixed = store.joint("a.weight", "c.weight")
    assert torch.equal(mixed, torch.cat([values[0], module["c"].weight.detach()]))
    store.tell()
    assert "1 linears, such as a.weight" in capsys.readouterr().err
    assert not store.stored_alike("a.weight", "c.weight")
