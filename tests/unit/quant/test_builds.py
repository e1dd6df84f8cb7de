"""Builds by name: every class of module has a scheme or none, and parameters have a class."""

import pytest

from lean_laguna.core.errors import ConfigError
from lean_laguna.quant.builds import BUILDS, build, class_of
from lean_laguna.quant.scheme import FP8_BLOCK, NVFP4


def test_builds_say_what_is_quantised_how():
    assert build("bf16") == {}
    assert build("nvfp4-attention") == dict.fromkeys(("experts", "shared", "attention"), NVFP4)
    assert build("nvfp4-all")["head"] == FP8_BLOCK
    with pytest.raises(ConfigError, match=r"nvfp4-attentoin.*nvfp4-attention"):
        build("nvfp4-attentoin")


CLASSES = ("attention", "experts", "shared", "dense", "head")


@pytest.mark.parametrize(
    ("parameter", "kind"),
    [
        ("model.layers.3.self_attn.g_proj.weight", "attention"),
        ("model.layers.3.self_attn.q_norm.weight", None),
        ("model.layers.3.mlp.experts.gate_up_proj", "experts"),
        ("model.layers.3.mlp.shared_experts.down_proj.weight", "shared"),
        ("model.layers.0.mlp.up_proj.weight", "dense"),
        ("model.layers.3.mlp.gate.weight", None),
        ("model.embed_tokens.weight", None),
        ("lm_head.weight", "head"),
    ],
)
def test_parameters_have_the_class_of_their_module(parameter, kind):
    assert class_of(parameter) == kind
    assert all(set(classes) <= {*CLASSES} for classes in BUILDS.values())
