"""Kernels are sorted by name; a step's bytes are those of the weights and keys it must read."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; it comes with PyTorch's CUDA builds")

from lean_laguna.engine.gpu_profile import class_of, step_bytes
from support.gpu import toy_engine, toy_target


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("_expert_down_kernel", "experts down"),
        ("experts_up", "experts gate/up"),
        ("_expert_gate_up_kernel", "experts gate/up"),
        ("_gate_up_kernel", "dense products"),
        ("project_add", "dense products"),
        ("_attend_kernel", "attention"),
        ("combine_kernel", "attention"),
        ("_head_kernel", "head"),
        ("_accept_kernel", "other"),
    ],
)
def test_kernels_have_a_class(kernel, name):
    assert class_of(kernel) == name


def test_bytes_of_a_step_are_counted_from_the_weights():
    engine = toy_engine()
    found = step_bytes(engine.programs, context_len=30)
    target = toy_target()
    config = target.config
    per_expert = 3 * config.moe_intermediate_size * config.hidden_size * 4
    shared = target.layers[1].mlp.shared_experts.down_proj.weight.nbytes
    assert (
        found["experts gate/up"] + found["experts down"] - shared == config.num_experts_per_tok * per_expert
    )
    assert found["head"] == target.lm_head.weight.nbytes
    # 30 keys of the full layer, a window of the sliding one.
    assert found["attention"] == 2 * (30 + config.sliding_window) * config.head_dim * 4
    assert torch.tensor(list(found.values())).sum() < sum(p.nbytes for p in target.parameters())
