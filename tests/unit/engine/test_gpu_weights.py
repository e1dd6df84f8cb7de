"""The kernels' weights are the modules' own values, in the kernels' order, without a second copy."""

import copy

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; it comes with PyTorch's CUDA builds")

from lean_laguna.core.model_config import LagunaConfig
from lean_laguna.engine.gpu_weights import drafter_weights, target_weights, why_not, why_not_cuda
from lean_laguna.models.dspark import DSparkDrafter
from lean_laguna.models.laguna import LagunaForCausalLM
from lean_laguna.models.packed_parameters import materialise
from support.engines import tiny_drafter, tiny_target
from support.gpu import toy_drafter
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


def test_linears_that_lie_side_by_side_from_the_start_are_not_moved():
    given = tiny_target()
    with torch.device("meta"):
        target = LagunaForCausalLM(given.config)
    materialise(target, CPU, joint=target.read_together())
    target.load_state_dict(given.state_dict())
    places = {name: p.data_ptr() for name, p in target.named_parameters()}
    weights = target_weights(target, 40)
    assert {name: p.data_ptr() for name, p in target.named_parameters()} == places
    for i, layer in enumerate(weights.layers):
        assert layer.attention.qkv.data_ptr() == places[f"model.layers.{i}.self_attn.q_proj.weight"]
    router = weights.layers[1].mlp.router_gate_up
    assert router.data_ptr() == places["model.layers.1.mlp.gate.weight"]


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
    assert why_not_cuda(torch.zeros(1)) == "they run bfloat16, not float32"


@pytest.mark.parametrize("with_markov", [True, False])
def test_a_confidence_logit_is_a_part_of_the_state_and_a_part_of_the_token_before(with_markov, own_seed):
    drafter = toy_drafter("dspark", confidence_head_with_markov=with_markov)
    assert isinstance(drafter, DSparkDrafter)
    draw = torch.Generator().manual_seed(own_seed)
    hidden = torch.randn(5, drafter.norm.shape[0], generator=draw)
    tokens = torch.randint(drafter.config.vocab_size, (5,), generator=draw)
    expected = drafter.confidence_logits(hidden, drafter.markov_rows(tokens))
    spark = drafter_weights(drafter, 40).spark
    found = hidden @ spark.confidence + spark.confidence_bias + spark.after[tokens]
    torch.testing.assert_close(found, expected)
    assert bool(spark.after.any()) is with_markov
