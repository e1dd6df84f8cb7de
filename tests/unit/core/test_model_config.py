import json

import pytest
from tests.support.targets import FULL, SLIDING, laguna_json, random_json

from lean_laguna.core.errors import CheckpointError, ConfigError
from lean_laguna.core.model_config import LagunaConfig

SLIDING_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}


def yarn(factor, original, beta_fast, attention_factor):
    return {
        "rope_type": "yarn",
        "rope_theta": 500000.0,
        "partial_rotary_factor": 0.5,
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": beta_fast,
        "beta_slow": 1.0,
        "attention_factor": attention_factor,
    }


def published(**changes):
    """What the three published configs share."""
    return {
        "architectures": ["LagunaForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_laguna.LagunaConfig"},
        "model_type": "laguna",
        "vocab_size": 100352,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "sliding_window": 512,
        "num_experts": 256,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-6,
        "bos_token_id": 2,
        "eos_token_id": [2, 24],
        "pad_token_id": 9,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "moe_routed_scaling_factor": 2.5,
    } | changes


XS_2 = published(
    hidden_size=2048,
    num_hidden_layers=40,
    intermediate_size=8192,
    num_attention_heads_per_layer=[48, 64, 64, 64] * 10,
    layer_types=[FULL, SLIDING, SLIDING, SLIDING] * 10,
    num_experts_per_tok=8,
    moe_intermediate_size=512,
    shared_expert_intermediate_size=512,
    mlp_layer_types=["dense"] + ["sparse"] * 39,
    gating=True,
    max_position_embeddings=131072,
    rope_parameters={
        FULL: yarn(32.0, 4096, 64.0, 1.0),
        SLIDING: SLIDING_ROPE,
        "original_max_position_embeddings": 4096,
    },
)
XS_2_1 = XS_2 | {
    "mlp_only_layers": [0],
    "decoder_sparse_step": 1,
    "gating": "per-head",
    "gating_types": ["per_head"] * 40,
    "moe_router_logit_softcapping": 0.0,
    "moe_apply_router_weight_on_input": False,
    "norm_topk_prob": True,
    "max_position_embeddings": 262144,
    "rope_parameters": {FULL: yarn(32.0, 8192, 64.0, 1.3465735902799727), SLIDING: SLIDING_ROPE},
}
S_2_1 = published(
    hidden_size=3072,
    num_hidden_layers=48,
    intermediate_size=12288,
    num_attention_heads_per_layer=[48, 72, 72, 72] * 12,
    layer_types=[FULL, SLIDING, SLIDING, SLIDING] * 12,
    num_experts_per_tok=10,
    moe_intermediate_size=1024,
    shared_expert_intermediate_size=1024,
    mlp_layer_types=["dense"] + ["sparse"] * 47,
    mlp_only_layers=[0],
    decoder_sparse_step=1,
    gating="per-head",
    gating_types=["per_head"] * 48,
    hidden_act="silu",
    norm_topk_prob=True,
    max_position_embeddings=1048576,
    rope_parameters={FULL: yarn(128.0, 8192, 32.0, 1.4852030263919618), SLIDING: SLIDING_ROPE},
)


@pytest.mark.parametrize("given", [XS_2, XS_2_1, S_2_1], ids=["XS.2", "XS-2.1", "S-2.1"])
def test_published_configs_are_read(given):
    config = LagunaConfig.from_dict(given)
    assert config.layer_types.count("full_attention") * 4 == config.num_hidden_layers
    assert set(config.gating) == {"per-head"}
    assert config.mlp_layer_types[0] == "dense"
    assert set(config.mlp_layer_types[1:]) == {"sparse"}
    assert config.norm_topk_prob is True
    assert config.router_logit_softcapping == 0.0
    assert config.moe_routed_scaling_factor == 2.5
    assert config.eos_token_ids == (2, 24)
    assert (config.bos_token_id, config.pad_token_id) == (2, 9)
    assert config.sliding_rope.rotary_dim(128) == 128
    assert config.full_rope.rotary_dim(128) == 64
    expected = given["rope_parameters"][FULL]["attention_factor"]
    assert config.full_rope.attention_scaling == expected
    assert config.num_attention_heads_per_layer[:4] == tuple(given["num_attention_heads_per_layer"][:4])


@pytest.mark.parametrize("seed", range(20))
def test_what_is_written_reads_back(seed):
    config = LagunaConfig.from_dict(random_json(seed))
    assert LagunaConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_mixed_gates_are_written_per_layer():
    types = ["per_head", "per_element", "per_head", "per_head"]
    config = LagunaConfig.from_dict(laguna_json(gating_types=types))
    assert config.gating == ("per-head", "per-element", "per-head", "per-head")
    assert LagunaConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("spelling", "meaning"),
    [(True, "per-head"), ("per-head", "per-head"), ("per_head", "per-head"), ("per-element", "per-element"),
     ("per_element", "per-element"), (False, "off")],
)  # fmt: skip
def test_gates_have_many_spellings(spelling, meaning):
    assert LagunaConfig.from_dict(laguna_json(gating=spelling)).gating == (meaning,) * 4


def test_a_null_gate_is_none_and_a_missing_one_is_per_head():
    assert LagunaConfig.from_dict({**laguna_json(), "gating": None}).gating == ("off",) * 4
    assert LagunaConfig.from_dict(laguna_json(gating=None)).gating == ("per-head",) * 4


def test_layer_gates_override_the_common_one():
    given = laguna_json(gating="per-element", gating_types=["per_head"] * 4)
    assert LagunaConfig.from_dict(given).gating == ("per-head",) * 4


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"mlp_only_layers": [0]}, "dsss"),
        ({"mlp_only_layers": [0, 2], "decoder_sparse_step": 1}, "dsds"),
        ({"mlp_only_layers": [], "decoder_sparse_step": 2}, "dsds"),
        ({}, "dsss"),
        ({"mlp_layer_types": ["sparse", "dense", "sparse", "sparse"], "mlp_only_layers": [0]}, "sdss"),
    ],
)
def test_dense_layers_have_two_spellings(keys, expected):
    config = LagunaConfig.from_dict({**laguna_json(mlp_layer_types=None), **keys})
    assert "".join(kind[0] for kind in config.mlp_layer_types) == expected


def test_one_head_count_serves_all_layers():
    given = laguna_json(num_attention_heads_per_layer=None)
    assert LagunaConfig.from_dict(given).num_attention_heads_per_layer == (4,) * 4


def test_a_missing_scaling_factor_is_one():
    assert (
        LagunaConfig.from_dict(laguna_json(moe_routed_scaling_factor=None)).moe_routed_scaling_factor == 1.0
    )


def test_layers_without_types_are_full():
    given = laguna_json(layer_types=None, sliding_window=None)
    assert LagunaConfig.from_dict(given).layer_types == ("full_attention",) * 4


def test_global_attention_is_full_attention():
    given = laguna_json(layer_types=["global_attention", SLIDING, SLIDING, "global_attention"])
    assert LagunaConfig.from_dict(given) == LagunaConfig.from_dict(laguna_json())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "'attention_bias' = True asks for biases.*accepted: False"),
        ({"qkv_bias": True}, "'qkv_bias' = True asks for biases"),
        ({"swa_attention_sink_enabled": True}, "attention sinks, which is not supported; accepted: False"),
        ({"moe_apply_router_weight_on_input": True}, "router weights applied to the experts' input"),
        ({"moe_router_use_sigmoid": False}, "'moe_router_use_sigmoid' = False.*accepted: True"),
        ({"moe_router_score_func": "sqrtsoftplus"}, "'sqrtsoftplus'.*accepted: 'sigmoid'"),
        ({"qk_norm_type": "layernorm"}, "'qk_norm_type' = 'layernorm'.*accepted: 'rmsnorm'"),
        ({"hidden_act": "gelu"}, "'hidden_act' = 'gelu'.*accepted: 'silu'"),
        (
            {"layer_types": [FULL, "chunked_attention", FULL, FULL]},
            r"'layer_types\[1\]'.*'chunked_attention'",
        ),
        ({"layer_types": [FULL]}, "'layer_types' must be a list with num_hidden_layers = 4 entries"),
        ({"mlp_layer_types": ["dense"] * 3 + ["moe"]}, r"'mlp_layer_types\[3\]' must be 'dense' or 'sparse'"),
        (
            {"gating": "per-token"},
            "'gating' must be true, 'per-head', 'per-element' or false, found 'per-token'",
        ),
        ({"gating": 1}, "'gating' must be .*, found 1"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"hidden_size": 0}, "'hidden_size' must be a whole number from 1, found 0"),
        ({"vocab_size": "64"}, "'vocab_size' must be a whole number from 1, found '64'"),
        ({"rms_norm_eps": float("inf")}, "'rms_norm_eps' must be a finite number from 0, found inf"),
        (
            {"num_attention_heads_per_layer": [4, 5, 6, 4]},
            r"\[1\] must be a multiple of num_key_value_heads = 2",
        ),
        ({"num_attention_heads_per_layer": [4, "6", 6, 4]}, "a list of head counts from 1"),
        ({"num_experts_per_tok": 9}, "'num_experts_per_tok' must be at most num_experts = 8, found 9"),
        ({"num_experts": None}, "'num_experts' is missing"),
        ({"num_experts": 0}, "'num_experts' must be at least 1, found 0"),
        ({"sliding_window": None}, "'sliding_window' is missing"),
        ({"eos_token_id": "2"}, "'eos_token_id' must be a token id"),
        ({"tie_word_embeddings": "no"}, "'tie_word_embeddings' must be true or false, found 'no'"),
        (
            {"mlp_layer_types": None, "mlp_only_layers": 0},
            "'mlp_only_layers' must be a list of layer numbers",
        ),
        ({"head_dim": 5}, "must leave an even number of rotary dimensions of head_dim = 5"),
        ({"model_type": "llama"}, "'model_type' must be 'laguna', found 'llama'"),
        ({"architectures": ["Foo"]}, "'architectures'.*LagunaForCausalLM"),
        ({"architectures": ["DFlashLagunaForCausalLM"]}, "this is a drafter.*speculative model"),
        ({"dflash_config": {}}, "this is a drafter"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        LagunaConfig.from_dict(laguna_json(**changes), "there/config.json")
    assert str(caught.value).startswith("there/config.json: ")


def test_metadata_is_ignored_without_a_word():
    given = laguna_json(my_key=1, provenance={"by": "us"}, unsloth_version="1", bad_words_ids=[[1]])
    assert LagunaConfig.from_dict(given) == LagunaConfig.from_dict(laguna_json())


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("slidng_window", "sliding_window"),
        ("gatings", "gating"),
        ("moe_routed_scale_factor", "moe_routed_scaling_factor"),
    ],
)
def test_a_misspelt_key_is_an_error_that_names_it(key, meant):
    with pytest.raises(ConfigError, match=rf"unknown key '{key}'; did you mean '{meant}'"):
        LagunaConfig.from_dict(laguna_json(**{key: 3}))


@pytest.mark.parametrize(
    ("key", "value"),
    [("final_logit_softcapping", 30.0), ("embedding_multiplier", 12), ("kv_lora_rank", 512),
     ("clip_qkv", 8.0),
     ("use_qk_norm", False), ("n_shared_experts", 2)],
)  # fmt: skip
def test_a_key_that_changes_the_maths_is_refused(key, value):
    with pytest.raises(ConfigError, match=rf"'{key}' = .* not supported"):
        LagunaConfig.from_dict(laguna_json(**{key: value}))


def test_files_are_read_by_name_or_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(laguna_json()))
    assert LagunaConfig.from_file(tmp_path) == LagunaConfig.from_file(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "not found"), ("{", "cannot be read as JSON"), ("[]", "must hold a JSON object")],
)
def test_broken_files_are_named(tmp_path, text, message):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=f"config.json: {message}"):
        LagunaConfig.from_file(tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", 10**30),
        ("hidden_size", 10**400),
        ("num_hidden_layers", 2**29),
        ("num_experts", 2**29),
        ("max_position_embeddings", 10**30),
        ("eos_token_id", 10**30),
        ("rms_norm_eps", 10**400),
        ("architectures", 5),
        ("scoring_func", "softmax"),
        ("use_attention_sinks", True),
        ("n_group", 4),
    ],
)
def test_a_value_that_nothing_could_be_built_from_is_named(field, value):
    with pytest.raises(ConfigError, match=f"'{field}'"):
        LagunaConfig.from_dict(laguna_json() | {field: value}, "config.json")
