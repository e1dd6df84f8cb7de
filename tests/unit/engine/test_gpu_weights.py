"""The kernels' weights are the modules' own values, in the kernels' order, without a second copy."""

import copy

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; it comes with PyTorch's CUDA builds")

from lean_laguna.core.model_config import LagunaConfig
from lean_laguna.engine.gpu_weights import can_compile_cuda, drafter_weights, target_weights, why_not
from support.engines import tiny_drafter, tiny_target
from support.targets import laguna_json, random_target

CPU = torch.device("cpu")


def test_a_targets_projections_lie_side_by_side_and_keep_their_values():
    target = copy.deepcopy(tiny_target())
    before = {name: p.clone() for name, p in target.named_parameters()}
    weights = target_weights(target, 40)
    attention, module = weights.layers[1].attention, target.layers[1].self_attn
    prefix = "model.layers.1.self_attn."
    joint = torch.cat([before[f"{prefix}{name}_proj.weight"] for name in "qkvg"])
    assert torch.equal(attention.qkv, joint)
    assert attention.qkv.data_ptr() == module.q_proj.weight.data_ptr()
    assert attention.shape.window == target.config.sliding_window
    assert weights.layers[0].attention.shape.window == 0
    router = weights.layers[1].mlp.router_gate_up
    assert torch.equal(router[: target.config.num_experts], before["model.layers.1.mlp.gate.weight"])
    for name, parameter in target.named_parameters():
        assert torch.equal(parameter, before[name]), name
    again = target_weights(target, 40)
    assert again.layers[1].attention.qkv.data_ptr() == attention.qkv.data_ptr()


def test_a_drafters_context_projection_holds_every_layers_keys_and_values():
    drafter = copy.deepcopy(tiny_drafter(layers="SS"))
    weights = drafter_weights(drafter, 40)
    rows = [layer.self_attn.kv_weight() for layer in drafter.layers]
    assert torch.equal(weights.context_kv, torch.cat(rows))
    assert len(weights.layers) == 2
    assert weights.context_norms is None
    assert weights.layers[0].attention.shape.causal == drafter.config.causal


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"gating": "per-element"}, "gate is per element"), ({"head_dim": 10}, "not a power of two")],
)
def test_what_the_kernels_cannot_run_is_named(monkeypatch, changes, reason):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    given = laguna_json(**changes)
    if "head_dim" in changes:
        given["rope_parameters"]["full_attention"]["partial_rotary_factor"] = 0.6
    target = random_target(LagunaConfig.from_dict(given))
    assert reason in why_not(target, None, CPU)


def test_reasons_of_the_machine_and_of_the_drafter(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert why_not(tiny_target(), tiny_drafter(layers="SS"), CPU) is None
    assert "not all of one kind" in why_not(tiny_target(), tiny_drafter(layers="SF"), CPU)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "interpreter" in why_not(tiny_target(), None, CPU)
    assert not can_compile_cuda(torch.zeros(1))
