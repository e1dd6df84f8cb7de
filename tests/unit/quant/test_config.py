"""``quantization_config``: every spelling, whom it means, and what it refuses."""

from __future__ import annotations

import re
from typing import Any

import pytest

from lean_laguna.core.errors import ConfigError
from lean_laguna.quant.config import QuantizationConfig, read_quantization
from lean_laguna.quant.scheme import FP8_BLOCK, NVFP4, packed_integer

NVFP4_WEIGHTS = {
    "num_bits": 4,
    "type": "float",
    "symmetric": True,
    "strategy": "tensor_group",
    "group_size": 16,
}
INT4_WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
INT8_WEIGHTS = {**INT4_WEIGHTS, "num_bits": 8}
EXPERT = "model.layers.3.mlp.experts.7.gate_proj"
QUERY = "model.layers.3.self_attn.q_proj"


def section(**changes: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": NVFP4_WEIGHTS}
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*self_attn.*"],
        "quantization_status": "compressed",
    } | changes


def read(**changes: Any) -> QuantizationConfig:
    config = read_quantization({"quantization_config": section(**changes)}, "config.json")
    assert config is not None
    return config


def refusal(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(**changes)
    return str(caught.value)


def test_ignore_beats_targets_by_name_and_by_expression() -> None:
    config = read()
    assert config.scheme_of(EXPERT) == NVFP4
    assert config.scheme_of(QUERY) is None
    assert config.scheme_of("lm_head") is None
    assert config.scheme_of("model.embed_tokens", kind="Embedding") is None


def test_an_expression_matches_from_the_start_of_a_name() -> None:
    assert read(ignore=["re:mlp.*"]).scheme_of(EXPERT) == NVFP4
    assert read(ignore=["re:.*mlp.*"]).scheme_of(EXPERT) is None


def test_a_name_beats_a_class_and_groups_mix_formats() -> None:
    groups = {
        "group_0": {"targets": ["Linear"], "weights": INT4_WEIGHTS, "format": "pack-quantized"},
        "group_1": {
            "targets": ["re:.*layers.31.*experts.*"],
            "weights": INT8_WEIGHTS,
            "format": "pack-quantized",
        },
        "group_2": {"targets": [QUERY], "weights": NVFP4_WEIGHTS, "format": "nvfp4-pack-quantized"},
    }
    config = read(format="mixed-precision", config_groups=groups, ignore=None)
    assert config.scheme_of(EXPERT) == packed_integer(4, 32)
    assert config.scheme_of("model.layers.31.mlp.experts.0.up_proj") == packed_integer(8, 32)
    assert config.scheme_of(QUERY) == NVFP4


def test_both_spellings_of_the_shared_expert_are_one_module() -> None:
    config = read(ignore=["model.layers.1.mlp.shared_experts.up_proj"])
    assert config.scheme_of("model.layers.1.mlp.shared_expert.up_proj") is None
    assert config.scheme_of("model.layers.1.mlp.shared_expert.gate_proj") == NVFP4


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("compression_config", section()),
        ("quantization_config", {"quantization_config": section(), "quant_method": "compressed-tensors"}),
        (
            "quantization_config",
            section(sparsity_config={}, transform_config={}, global_compression_ratio=None),
        ),
        ("quantization_config", section(config_groups={"NVFP4A16": ["Linear"]})),
        ("quantization_config", section(format="mixed-precision")),
        ("quantization_config", section(quantization_status="frozen")),
        (
            "quantization_config",
            section(
                config_groups={
                    "g": {"targets": ["Linear"], "weights": {**NVFP4_WEIGHTS, "strategy": "group"}}
                }
            ),
        ),
        (
            "quantization_config",
            section(
                config_groups={"g": {"targets": ["Linear"], "weights": {**NVFP4_WEIGHTS, "type": "FLOAT"}}}
            ),
        ),
    ],
)
def test_every_spelling_reads_the_same(key: str, value: Any) -> None:
    config = read_quantization({key: value}, "config.json")
    assert config is not None
    assert config.scheme_of(EXPERT) == NVFP4
    assert config.scheme_of(QUERY) is None


def test_block_fp8_in_both_spellings_and_deepseeks() -> None:
    for structure in ([128, 128], "128x128"):
        weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": structure}
        activations = {
            "num_bits": 8,
            "type": "float",
            "dynamic": True,
            "strategy": "group",
            "group_size": 128,
        }
        group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
        assert read(format="float-quantized", config_groups={"g": group}).scheme_of(EXPERT) == FP8_BLOCK
    plain = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
        "ignored_layers": ["model.layers.3.self_attn"],
    }
    config = read_quantization({"quantization_config": plain}, "config.json")
    assert config is not None
    scheme = config.scheme_of(EXPERT)
    assert scheme is not None
    assert "weight_scale_inv" in scheme.tensors(256, 256)
    assert config.scheme_of(QUERY) is None
    odd = plain | {"activation_scheme": "statik"}
    with pytest.raises(
        ConfigError, match="'activation_scheme' must be 'dynamic' or 'static', found 'statik'"
    ):
        read_quantization({"quantization_config": odd}, "config.json")


def test_modelopt_names_the_global_scale_its_own_way() -> None:
    given = {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head", "*self_attn*"]}
    config = read_quantization({"quantization_config": given}, "config.json")
    assert config is not None
    scheme = config.scheme_of(EXPERT)
    assert scheme is not None
    assert set(scheme.tensors(32, 32)) == {"weight", "weight_scale", "weight_scale_2", "input_scale"}
    assert config.scheme_of(QUERY) is None


@pytest.mark.parametrize(
    ("cache", "has_fp8"),
    [
        ({"kv_cache_quant_algo": "FP8"}, True),
        ({"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}}, True),
        ({"kv_cache_scheme": {"dynamic": False, "num_bits": 4, "type": "float"}}, False),
        ({}, False),
    ],
)
def test_modelopts_fp8_cache_is_known_in_both_spellings(cache: dict[str, Any], has_fp8: bool) -> None:
    given = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]} | cache
    config = read_quantization({"quantization_config": given}, "config.json")
    assert config is not None
    assert config.has_fp8_kv is has_fp8


@pytest.mark.parametrize("algorithm", [["NVFP4"], {"a": 1}, None, "NVFP5"])
def test_modelopts_algorithm_must_be_a_known_word(algorithm: Any) -> None:
    given = {"quant_method": "modelopt", "quant_algo": algorithm}
    with pytest.raises(ConfigError, match=r"'quant_algo' must be one of NVFP4, FP8, .*, found"):
        read_quantization({"quantization_config": given}, "config.json")


def test_no_section_is_an_unquantised_checkpoint() -> None:
    assert read_quantization({"hidden_size": 8}, "config.json") is None
    assert read_quantization({"quantization_config": None}, "config.json") is None


def test_fp8_keys_and_values_are_noted() -> None:
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
    assert read(kv_cache_scheme=scheme).has_fp8_kv
    assert not read().has_fp8_kv
    assert "num_bits 8" in refusal(kv_cache_scheme={**scheme, "num_bits": 4})


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ({**NVFP4_WEIGHTS, "num_bits": 3}, "num_bits 3"),
        ({**NVFP4_WEIGHTS, "group_size": 32}, "group_size 32"),
        ({**NVFP4_WEIGHTS, "strategy": "grup"}, "did you mean 'group'?"),
        ({**NVFP4_WEIGHTS, "numbits": 4}, "unknown key 'numbits'; did you mean 'num_bits'?"),
        ({**NVFP4_WEIGHTS, "symmetric": False}, "'symmetric' must be true"),
        ({**NVFP4_WEIGHTS, "dynamic": True}, "'dynamic' must be false"),
        ({**INT4_WEIGHTS, "group_size": 0}, "'group_size'"),
        (INT4_WEIGHTS, "not stored as 'nvfp4-pack-quantized'"),
        (None, "must be a JSON object"),
    ],
)
def test_wrong_arguments_are_named(weights: Any, said: str) -> None:
    message = refusal(config_groups={"group_0": {"targets": ["Linear"], "weights": weights}})
    assert said in message
    assert "config.json: quantization_config: config_groups: group_0" in message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quant_method": "gptq"}, "quant_method 'gptq' is not supported"),
        ({"format": "marlin-24"}, "2:4 sparsity"),
        ({"format": "dense"}, "weights that are not compressed"),
        ({"ignore": ["re:(("]}, "not a regular expression"),
        ({"ignore": "lm_head"}, "must be a list"),
        ({"config_groups": []}, "'config_groups'"),
        ({"config_groups": {"W4A17": ["Linear"]}}, "did you mean 'W4A16'?"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "'sparsity_config' is not supported"),
    ],
)
def test_what_is_not_supported_is_said(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        read(**changes).scheme_of(EXPERT)


def test_mlx_checkpoints_are_named_as_such() -> None:
    with pytest.raises(ConfigError, match="MLX"):
        read_quantization({"quantization": {"mode": "nvfp4", "bits": 4}}, "config.json")


def test_unknown_keys_of_the_section_warn() -> None:
    with pytest.warns(UserWarning, match="keys without meaning here are ignored: novelty"):
        read(novelty=1)
