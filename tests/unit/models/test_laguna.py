import copy
import dataclasses

import pytest
import torch
from tests.support.targets import PagedRun, laguna_json, random_ids, random_target, run_alone

from lean_laguna.core.model_config import LagunaConfig
from lean_laguna.kernels.elementwise import silu_and_mul
from lean_laguna.kernels.linear import linear
from lean_laguna.kernels.moe import moe_experts
from lean_laguna.models.laguna import LagunaForCausalLM

# Dense and tiled float32 programs add in another order.
RELATIVE = 1e-5


def assert_close(found, expected):
    assert (found - expected).abs().max() / expected.abs().max() < RELATIVE


def dense(target, ids, **options):
    with torch.no_grad():
        return target.forward_dense(ids if ids.dim() == 2 else ids[None], **options)


@pytest.mark.parametrize(
    "changes",
    [{}, {"gating": "per-element"}, {"gating": False}, {"num_experts": 40}, {"tie_word_embeddings": True},
     {"moe_router_logit_softcapping": 0.5, "norm_topk_prob": False}, {"shared_expert_intermediate_size": 24}],
)  # fmt: skip
def test_both_paths_agree(changes):
    target = random_target(LagunaConfig.from_dict(laguna_json(**changes)))
    ids = random_ids(70)
    out = dense(target, ids, tap_layer_ids=(0, 1, 2, 3))
    logits, taps = run_alone(target, ids, [33, 37])
    assert_close(logits, target.compute_logits(out.hidden_states[0]))
    assert_close(taps, out.aux_hidden_states[0])
    assert torch.equal(out.last_residual, out.aux_hidden_states[:, :, 3])


def test_documents_packed_together_are_as_if_alone(tiny_target):
    first, second = random_ids(20, 1), random_ids(33, 2)
    documents = torch.tensor([[7] * 20 + [3] * 33])
    packed = dense(tiny_target, torch.cat((first, second)), document_ids=documents).hidden_states[0]
    assert_close(packed[:20], dense(tiny_target, first).hidden_states[0])
    assert_close(packed[20:], dense(tiny_target, second).hidden_states[0])


def test_given_positions_turn_the_heads(tiny_target):
    ids = random_ids(12)
    moved = dense(tiny_target, ids, positions=torch.arange(12)[None] + 5).hidden_states
    # Rotary positions are relative.
    assert (moved - dense(tiny_target, ids).hidden_states).abs().max() < 1e-4


def test_gradients_reach_every_weight_but_the_correction_bias():
    target = random_target(LagunaConfig.from_dict(laguna_json())).requires_grad_(True)
    for layer in target.layers[1:]:
        layer.mlp.gate.e_score_correction_bias.requires_grad_(False)
    out = target.forward_dense(random_ids(64).view(2, 32), collect_expert_ids=True)
    target.compute_logits(out.hidden_states.flatten(0, 1)).logsumexp(-1).sum().backward()
    for name, parameter in target.named_parameters():
        assert (parameter.grad is None) == name.endswith("e_score_correction_bias"), name
    assert [ids.shape for ids in out.expert_ids] == [(64, 2)] * 3


def test_a_training_step_after_serving_is_served(tiny_config):
    target = random_target(tiny_config)
    ids = random_ids(20)
    run_alone(target, ids, [20])
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.mul_(1.01)
    fresh = LagunaForCausalLM(tiny_config)
    fresh.load_state_dict(target.state_dict())
    assert torch.equal(run_alone(target, ids, [20])[0], run_alone(fresh, ids, [20])[0])


def test_serving_under_inference_mode_leaves_weights_that_train(tiny_config):
    target = random_target(tiny_config).requires_grad_(True)
    with torch.inference_mode():
        run_alone(target, random_ids(9), [9])
    target.forward_dense(random_ids(9)[None]).hidden_states.sum().backward()
    with torch.no_grad():
        target.layers[1].mlp.experts.gate_up_proj.sub_(target.layers[1].mlp.experts.gate_up_proj.grad)


def test_each_number_of_threads_has_its_own_prepared_pass(tiny_target):
    ids, before = random_ids(12), torch.get_num_threads()
    expected, _ = run_alone(tiny_target, ids, [12])
    try:
        for threads in (1, 2, 1):
            torch.set_num_threads(threads)
            assert_close(run_alone(tiny_target, ids, [1] * 12)[0], expected)
    finally:
        torch.set_num_threads(before)


def test_weights_loaded_moved_and_copied_after_serving_are_served(tiny_config, tiny_target):
    ids = random_ids(20)
    expected, _ = run_alone(tiny_target, ids, [20])
    target = random_target(tiny_config, seed=5)
    run_alone(target, ids, [20])
    target.load_state_dict(tiny_target.state_dict())
    assert torch.equal(run_alone(target, ids, [20])[0], expected)
    assert torch.equal(run_alone(target.double().float(), ids, [20])[0], expected)
    assert torch.equal(run_alone(copy.deepcopy(target), ids, [20])[0], expected)


def test_state_dict_names_are_transformers_names(tiny_target):
    names = set(tiny_target.state_dict())
    assert {
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.1.self_attn.g_proj.weight",
        "model.layers.1.self_attn.q_norm.weight",
        "model.layers.1.mlp.gate.weight",
        "model.layers.1.mlp.gate.e_score_correction_bias",
        "model.layers.1.mlp.experts.gate_up_proj",
        "model.layers.1.mlp.experts.down_proj",
        "model.layers.1.mlp.shared_experts.up_proj.weight",
    } <= names


def test_groups_hold_the_layers_of_each_kind(tiny_target):
    full, sliding = tiny_target.kv_groups()
    assert (full.name, full.num_layers, full.window) == ("full", 2, None)
    assert (sliding.name, sliding.num_layers, sliding.window) == ("sliding", 2, 8)


def test_taps_come_in_the_order_asked(tiny_target):
    ids = random_ids(10)
    _, every = run_alone(tiny_target, ids, [10])
    ((_, some),) = PagedRun(tiny_target, [10]).step([(0, ids)], (3, 1))
    assert torch.equal(some, every[:, [3, 1]])


def test_embedding_and_logits_are_plain_products(tiny_target):
    ids = random_ids(6).view(2, 3)
    assert torch.equal(tiny_target.embed(ids), tiny_target.model.embed_tokens.weight[ids])
    hidden = torch.randn(3, 32)
    expected = hidden @ tiny_target.lm_head.weight.t()
    torch.testing.assert_close(tiny_target.compute_logits(hidden), expected, rtol=1e-5, atol=1e-5)


def test_fresh_weights_are_drawn_alike_from_one_generator(tiny_config):
    first, second = (LagunaForCausalLM(tiny_config) for _ in range(2))
    for target in (first, second):
        target.reset_parameters(0.02, torch.Generator().manual_seed(3))
    for (name, one), other in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
        if name.endswith("norm.weight"):
            assert one.eq(1).all()


def test_bfloat16_keeps_rows_apart_too(tiny_config):
    target = random_target(tiny_config).to(torch.bfloat16)
    ids = random_ids(30)
    first = run_alone(target, ids, [30])[0]
    assert torch.equal(first, run_alone(target, ids, [1] * 30)[0])
    assert first.dtype == torch.float32


def test_routing_weights_are_rounded_before_the_sum_is_scaled(tiny_config):
    config = dataclasses.replace(tiny_config, moe_routed_scaling_factor=2.7)
    target = random_target(config).to(torch.bfloat16)
    moe = next(layer.mlp for layer in target.layers if hasattr(layer.mlp, "experts"))
    target.pack()
    x = torch.randn(24, config.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.no_grad():
        found = moe.run(x.clone())
        joint = linear(x, moe.packed)
        weights, expert_ids = moe.gate.route(joint[:, -config.num_experts :].float())
        rounded = weights.bfloat16().float()
        assert not torch.equal(rounded, weights)
        routed = moe_experts(x, moe.experts.gate_up_proj, moe.experts.down_proj, rounded, expert_ids)
        shared = linear(silu_and_mul(joint[:, : -config.num_experts]), moe.shared_experts.down_proj.weight)
        assert torch.equal(found, routed * torch.tensor(2.7).bfloat16() + shared)
