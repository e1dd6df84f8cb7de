"""Names of linears and what they are for."""

from __future__ import annotations

import pytest

from lean_laguna.convert.modules import class_of, fused_set, plain_name

NAMES = {
    "model.layers.3.mlp.experts.17.gate_proj": "experts",
    "model.layers.3.mlp.shared_expert.up_proj": "shared",
    "model.layers.3.mlp.shared_experts.up_proj": "shared",
    "model.layers.0.mlp.down_proj": "dense",
    "model.layers.3.self_attn.q_proj": "attention",
    "layers.3.self_attn.o_proj": "attention",
    "model.layers.3.self_attn.g_proj": "gates",
    "language_model.lm_head": "head",
    "fc": "fc",
    "model.layers.3.mlp.gate": None,
    "model.embed_tokens": None,
    "model.layers.3.self_attn.q_norm": None,
    "model.norm": None,
    "hidden_norm": None,
}


@pytest.mark.parametrize("name", NAMES)
def test_a_linear_is_known_by_its_name(name: str) -> None:
    assert class_of(name) == NAMES[name]


def test_linears_that_run_as_one_share_a_set() -> None:
    layer = "model.layers.1."
    assert fused_set(f"{layer}self_attn.q_proj") == fused_set(f"{layer}self_attn.v_proj")
    assert fused_set(f"{layer}mlp.experts.2.gate_proj") == fused_set(f"{layer}mlp.experts.2.up_proj")
    alone = ("mlp.experts.2.down_proj", "mlp.experts.3.up_proj", "self_attn.o_proj", "self_attn.g_proj")
    assert len({fused_set(layer + name) for name in (*alone, "mlp.experts.2.up_proj")}) == 5


def test_plain_names_are_the_same_in_every_spelling() -> None:
    assert plain_name("language_model.model.layers.1.mlp.shared_experts.up_proj") == plain_name(
        "model.layers.1.mlp.shared_expert.up_proj"
    )
