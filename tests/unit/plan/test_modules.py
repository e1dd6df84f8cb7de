"""Names and classes of modules, held against the networks themselves."""

import pytest
import torch

from lean_laguna.core.drafter_config import DFlashConfig
from lean_laguna.core.model_config import LagunaConfig
from lean_laguna.models.checkpoint_writer import _stored_tensors
from lean_laguna.models.dflash import DFlashDrafter
from lean_laguna.models.laguna import LagunaForCausalLM
from lean_laguna.plan.modules import drafter_modules, module_class, target_modules
from support import drafters, targets


@pytest.mark.parametrize(
    "changes", [{}, {"gating": "per-element"}, {"gating": False}, {"tie_word_embeddings": True}]
)
def test_a_targets_modules_are_the_tensors_of_its_checkpoint(changes):
    config = LagunaConfig.from_dict(targets.laguna_json(**changes))
    with torch.device("meta"):
        network = LagunaForCausalLM(config)
    expected = {name: tuple(tensor.shape) for name, tensor in _stored_tensors(network, config)}
    found = {
        module.name if module.name.endswith("_bias") else f"{module.name}.weight": module.shape
        for module in target_modules(config)
    }
    assert found == expected


@pytest.mark.parametrize(
    "given",
    [
        drafters.laguna_json(),
        drafters.laguna_json(gating="per-element"),
        drafters.zlab_json(),
        drafters.speculators_json(draft_vocab_size=32),
    ],
)
def test_a_drafters_modules_hold_all_its_weights(given):
    config = DFlashConfig.from_dict(given)
    with torch.device("meta"):
        expected = sum(p.numel() for p in DFlashDrafter(config).parameters())
    assert sum(module.num_weights for module in drafter_modules(config)) == expected


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.embed_tokens", "embedding"),
        ("language_model.lm_head", "head"),
        ("model.layers.3.self_attn.q_norm", "norms"),
        ("model.layers.3.post_attention_layernorm", "norms"),
        ("model.norm", "norms"),
        ("model.layers.3.self_attn.g_proj", "attention"),
        ("model.layers.0.mlp.gate_proj", "dense"),
        ("model.layers.3.mlp.gate", "router"),
        ("model.layers.3.mlp.experts.e_score_correction_bias", "router"),
        ("model.layers.3.mlp.gate.e_score_correction_bias", "router"),
        ("model.layers.3.mlp.experts.17.gate_proj", "experts"),
        ("model.layers.3.mlp.experts.gate_up_proj", "experts"),
        ("model.layers.3.mlp.switch_mlp.up_proj", "experts"),
        ("model.layers.3.mlp.shared_expert.up_proj", "shared"),
        ("model.layers.3.mlp.shared_experts.up_proj", "shared"),
        ("model.layers.3.self_attn.sink", "other"),
    ],
)
def test_a_name_tells_what_a_weight_is_part_of(name, kind):
    assert module_class(name) == kind


def test_every_module_is_classed_by_its_name_as_by_its_place():
    config = LagunaConfig.from_dict(targets.laguna_json())
    assert all(module_class(module.name) == module.module_class for module in target_modules(config))
