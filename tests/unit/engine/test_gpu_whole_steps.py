"""Which passes one launch can run, and that each has one kernel for each width and choice of taps."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; it comes with PyTorch's CUDA builds")

from lean_laguna.engine import gpu_whole_steps
from lean_laguna.engine.gpu_state import MAX_ROWS
from lean_laguna.engine.gpu_whole_steps import Pass, WholeSteps
from lean_laguna.kernels.triton.attention import AttentionShape
from lean_laguna.kernels.triton.formats import Packed
from lean_laguna.kernels.triton.rows import Rows
from lean_laguna.kernels.triton.weights import AttentionWeights, DenseWeights, LayerWeights

D, P, V = 512, 128, 8


@pytest.fixture(autouse=True)
def _faster(monkeypatch):
    monkeypatch.setattr(gpu_whole_steps, "IS_FASTER", True)


def bf16(*size):
    return torch.zeros(size, dtype=torch.bfloat16)


def layer(head_dim=P):
    shape = AttentionShape(8, 2, head_dim, head_dim)
    attention = AttentionWeights(
        shape, bf16(D), bf16(shape.width, D), bf16(head_dim), bf16(head_dim), bf16(D, 8 * head_dim)
    )
    rotary = bf16(64, head_dim // 2), bf16(64, head_dim // 2)
    return LayerWeights(attention, DenseWeights(bf16(D), bf16(2 * D, D), bf16(D, D)), rotary)


def ints(*size):
    return torch.zeros(size, dtype=torch.int32)


def make_pass(*layers, pages=torch.bfloat16):
    rows = Rows(ints(1), ints(1), *(ints(MAX_ROWS) for _ in range(4)))
    size = (5, 16, 2, layers[0].attention.shape.head_dim)
    caches = [(torch.zeros(size, dtype=pages), torch.zeros(size, dtype=pages)) for _ in layers]
    return Pass(layers, bf16(D), caches, [ints(MAX_ROWS, 4)] * len(layers), rows, 1e-6)


def steps(**passes):
    return WholeSteps(passes, bf16(V, D), ints(MAX_ROWS), bf16(MAX_ROWS, D))


def test_plain_bf16_of_the_right_shape_fits():
    assert make_pass(layer(), layer()).fits


def test_other_heads_do_not_fit():
    assert not make_pass(layer(head_dim=64)).fits


def test_packed_weights_do_not_fit():
    one = layer()
    packed = Packed(
        "fp8", (2 * D, D), torch.bfloat16, torch.zeros(2 * D, D, dtype=torch.uint8), bf16(2 * D, 1), 1, D
    )
    assert not make_pass(dataclasses.replace(one, mlp=dataclasses.replace(one.mlp, gate_up=packed))).fits


def test_coded_pages_do_not_fit():
    assert not make_pass(layer(), pages=torch.float8_e4m3fn).fits


def test_only_what_fits_is_launched():
    found = steps(target=make_pass(layer(), layer()), drafter=make_pass(layer(head_dim=64)))
    assert found.names == {"target"}
    assert found.launch("drafter", 8) is None
    assert found.launch("target", 8) is not None


def test_nothing_is_launched_where_it_is_not_faster(monkeypatch):
    monkeypatch.setattr(gpu_whole_steps, "IS_FASTER", False)
    assert steps(target=make_pass(layer())).names == frozenset()


def test_nothing_fits_and_nothing_is_set_aside():
    found = steps(target=make_pass(layer(head_dim=64)))
    assert found.names == frozenset()
    assert found.launch("target", 8) is None
    found.check()


def test_a_kernel_for_each_width_and_choice_of_taps():
    found = steps(target=make_pass(layer(), layer()))
    taps = {1: bf16(MAX_ROWS, D)}
    kernels = {
        id(found.launch("target", cols, chosen).__self__) for cols in (8, 16) for chosen in (None, taps)
    }
    assert len(kernels) == 4
    assert id(found.launch("target", 8, taps).__self__) in kernels


def test_a_stuck_step_is_an_error():
    found = steps(target=make_pass(layer()))
    found.check()
    found._workspace.state[4] = 1
    with pytest.raises(RuntimeError, match="got stuck: block 0, layer 0"):
        found.check()
