import json

import pytest

from lean_laguna.core.drafter_config import DFlashConfig, is_drafter_config
from lean_laguna.core.drafter_writing import write_config
from lean_laguna.core.errors import CheckpointError, ConfigError
from lean_laguna.core.model_config import LagunaConfig
from support.drafters import laguna_json, speculators_json, tiny_target, zlab_json

SLIDING, FULL = ["sliding_attention"] * 2, ["full_attention"] * 2
WINDOW = {"layer_types": SLIDING, "use_sliding_window": True, "sliding_window": 8}
S_2_1 = {
    "architectures": ["LagunaForCausalLM"],
    "model_type": "laguna",
    "hidden_size": 3072,
    "num_hidden_layers": 6,
    "intermediate_size": 12288,
    "num_attention_heads": 72,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "layer_types": ["sliding_attention"] * 6,
    "sliding_window": 512,
    "sliding_windows": [512] * 6,
    "gating": "per-head",
    "vocab_size": 100352,
    "draft_vocab_size": 100352,
    "max_position_embeddings": 1048576,
    "num_target_layers": 48,
    "rope_theta": 500000.0,
    "block_size": 16,
    "dflash_config": {"target_layer_ids": [1, 10, 19, 29, 38, 47], "mask_token_id": 12, "causal": True},
    "eagle_aux_hidden_state_layer_ids": [2, 11, 20, 30, 39, 48],
}


def read(config):
    return DFlashConfig.from_dict(config, "config.json")


def laguna(dflash=None, **changes):
    config = laguna_json(**changes)
    config["dflash_config"] = config["dflash_config"] | (dflash or {})
    return config


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


def test_the_published_s_2_1_drafter_is_read_as_published():
    config = read(S_2_1)
    assert config.format == "laguna"
    assert config.layer_windows == (512,) * 6
    assert config.target_layer_ids == (1, 10, 19, 29, 38, 47)
    assert (config.draft_block_size, config.max_draft_tokens, config.mask_token_id) == (16, 15, 12)
    assert config.causal
    assert config.has_aux_norms
    assert config.norm_context
    assert config.gating == "per-head"
    assert (config.rope.rope_theta, config.rope.rope_type, config.rope.partial_rotary_factor) == (
        5e5,
        "default",
        1,
    )
    assert config.max_position_embeddings == 1048576


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (laguna_json(), "laguna"),
        (laguna_json(architectures=["LagunaForCausalLM"]), "laguna"),
        (zlab_json(), "z-lab"),
        (zlab_json(architectures=None), "z-lab"),
        (speculators_json(), "speculators"),
    ],
)
def test_formats_are_told_apart(config, expected):
    assert read(config).format == expected
    assert is_drafter_config(config)


def test_a_target_is_named_a_target():
    target = without(laguna_json(architectures=["LagunaForCausalLM"]), "dflash_config")
    assert not is_drafter_config(target)
    with pytest.raises(
        CheckpointError, match=r"this is a target \(LagunaForCausalLM\), not a drafter; pass it as"
    ):
        read(target)


@pytest.mark.parametrize(
    "config",
    [laguna_json(), laguna_json(architectures=["LagunaForCausalLM"]), zlab_json(), speculators_json()],
)
def test_a_drafter_given_as_the_target_is_named_a_drafter(config):
    with pytest.raises(ConfigError, match="this is a drafter"):
        LagunaConfig.from_dict(config, "config.json")


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (speculators_json(speculators_model_type="eagle3"), "'eagle3'"),
        (zlab_json(architectures=["Gemma4DSparkModel"]), "Gemma4DSparkModel"),
        (zlab_json(architectures=["DFlash2DraftModel"]), "DFlash2DraftModel"),
        (zlab_json(architectures=["Foo"]), "'architectures' must name a DFlash or DSpark drafter.*found Foo"),
    ],
)
def test_other_kinds_of_drafters_are_refused(config, found):
    with pytest.raises(CheckpointError, match=found):
        read(config)


@pytest.mark.parametrize("found", [True, 3, 0.5, "DFlashLagunaForCausalLM", {"DFlash": 1}])
@pytest.mark.parametrize("make", [laguna_json, zlab_json, speculators_json])
def test_architectures_that_are_no_list_are_named(make, found):
    with pytest.raises(ConfigError, match="'architectures' must be a list of names, found"):
        read(make(architectures=found))


def test_missing_sliding_windows_are_derived():
    assert "sliding_windows" not in laguna_json()
    assert read(laguna_json()).layer_windows == (8, 8)
    assert read(without(laguna_json(sliding_windows=[8, 8]), "sliding_window")).layer_windows == (8, 8)


def test_windows_that_contradict_each_other_are_refused():
    with pytest.raises(
        ConfigError, match=r"'sliding_window' must be what 'sliding_windows' says \(4\), found 8"
    ):
        read(laguna_json(sliding_windows=[4, 4]))
    with pytest.raises(ConfigError, match="'sliding_windows' must be one window repeated"):
        read(laguna_json(sliding_windows=[8]))
    with pytest.raises(ConfigError, match="'sliding_window' is missing"):
        read(without(laguna_json(), "sliding_window"))


@pytest.mark.parametrize(
    ("changes", "theta", "partial"),
    [
        pytest.param({"rope_theta": 500000.0}, 500000.0, 1.0, id="top level only: the trap"),
        pytest.param({"rope_theta": None}, 500000.0, 1.0, id="nothing at all"),
        pytest.param(
            {"rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
            1e4,
            1.0,
            id="nested",
        ),
        pytest.param(
            {"rope_parameters": {"full_attention": {"rope_theta": 7e4, "partial_rotary_factor": 0.5}}},
            7e4,
            0.5,
            id="nested, for the other type only",
        ),
        pytest.param(
            {"rope_parameters": {"rope_theta": 3e4}, "partial_rotary_factor": 0.5}, 3e4, 0.5, id="flat"
        ),
        pytest.param(
            {"rope_parameters": {"rope_type": "default"}, "rope_theta": 2e4}, 2e4, 1.0, id="flat, no theta"
        ),
        pytest.param({"swa_rope_parameters": {"rope_theta": 9e3}}, 9e3, 1.0, id="for sliding layers"),
    ],
)
def test_a_native_rope_is_read_in_every_spelling(changes, theta, partial):
    rope = read(laguna_json(**changes)).rope
    assert (rope.rope_theta, rope.partial_rotary_factor) == (theta, partial)


def test_the_qwen3_formats_rotate_whole_heads():
    nested = {
        "sliding_attention": {"rope_theta": 4e4, "partial_rotary_factor": 0.5},
        "full_attention": {"rope_theta": 1.0},
    }
    rope = read(speculators_json({"rope_parameters": nested})).rope
    assert (rope.rope_theta, rope.partial_rotary_factor) == (4e4, 1.0)


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize(
    "spell",
    [
        lambda value: laguna({"causal": value}),
        lambda value: without(laguna(is_causal=value) | {"dflash_config": laguna_dflash()}, "causal"),
        lambda value: laguna_json(causal=value, dflash_config=laguna_dflash()),
        lambda value: laguna_json(dflash_config=laguna_dflash() | {"is_causal": value}),
        lambda value: laguna({"causal": value}, is_causal=value),
        lambda value: zlab_json(is_causal=value),
        lambda value: zlab_json(is_causal=value, **WINDOW),
        lambda value: zlab_json(dflash_config=laguna_dflash() | {"causal": value}),
        lambda value: speculators_json(WINDOW, sliding_window_non_causal=not value),
    ],
)
def test_the_causal_flag_is_read_in_every_spelling(spell, value):
    config = read(spell(value))
    assert config.causal is value
    assert set(config.layer_causal) == {value}


def laguna_dflash():
    return {"target_layer_ids": [1, 3, 5], "mask_token_id": 12}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (laguna_json(dflash_config=laguna_dflash()), (True, True)),
        (laguna_json(dflash_config=laguna_dflash(), layer_types=FULL), (False, False)),
        (zlab_json(), (False, False)),
        (zlab_json(**WINDOW), (True, True)),
        (zlab_json(**WINDOW | {"layer_types": ["full_attention", "sliding_attention"]}), (False, True)),
        (speculators_json(), (False, False)),
        (speculators_json(WINDOW), (True, True)),
        (speculators_json(WINDOW | {"layer_types": ["full_attention", "sliding_attention"]}), (False, True)),
    ],
)
def test_without_a_flag_windowed_layers_are_causal_and_full_ones_are_not(config, expected):
    assert read(config).layer_causal == expected


def test_contradicting_causal_flags_are_refused():
    with pytest.raises(ConfigError, match=r"'is_causal' = false.*'causal' = true"):
        read(laguna({"causal": True}, is_causal=False))
    with pytest.raises(ConfigError, match="'causal' must be true or false, found 'yes'"):
        read(laguna({"causal": "yes"}))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (laguna({"target_layer_ids": None}), "'dflash_config.target_layer_ids' is missing"),
        (laguna({"target_layer_ids": [1, 1]}), r"must be distinct layers from 0, found \[1, 1\]"),
        (laguna(eagle_aux_hidden_state_layer_ids=[1, 3, 5]), r"target_layer_ids plus one \(\[2, 4, 6\]\)"),
        (laguna({"mask_token_id": None}), "'mask_token_id' is missing"),
        (laguna({"mask_token_id": 64}), r"'mask_token_id' must be below vocab_size \(64\), found 64"),
        (laguna(block_size=1), "'block_size' must be at least 2"),
        (laguna(block_size=10**6), r"'block_size' must be at most max_position_embeddings \(\d+\), found"),
        (laguna(draft_vocab_size=32), r"'draft_vocab_size' must be vocab_size \(64\)"),
        (laguna(attention_bias=True), "'attention_bias' must be false or absent, found True"),
        (laguna(swa_attention_sink_enabled=True), "'swa_attention_sink_enabled'"),
        (laguna(hidden_act="gelu"), "'hidden_act' must be 'silu', found 'gelu'"),
        (laguna(layer_types=None), "'layer_types' is missing"),
        (laguna(layer_types=["sliding_attention", "full_attention"]), "'layer_types' must be"),
        (laguna(num_attention_heads_per_layer=[4, 6]), "one number repeated num_hidden_layers"),
        (laguna(num_key_value_heads=3), "must be a multiple of 'num_key_value_heads'"),
        (laguna(gating="per-token"), "'gating' must be per-head, per-element or false"),
        (laguna(gating_types=["per_head", "per_element"]), "the same for all layers"),
        (laguna(hidden_size="32"), "'hidden_size' must be a whole number"),
        (without(laguna(), "hidden_size"), "'hidden_size' is missing"),
        (zlab_json(input_embedding_scale=2.0), "'input_embedding_scale' must be 1 or absent"),
        (zlab_json(final_logit_softcapping=30.0), "'final_logit_softcapping' must be 0 or absent"),
        (zlab_json(layer_types=SLIDING, sliding_window=8), "'use_sliding_window' must be true where"),
        (zlab_json(layer_types=["linear_attention"] * 2), "'full_attention' and 'sliding_attention'"),
        (speculators_json(sample_from_anchor=True), "'sample_from_anchor' must be false"),
        (speculators_json(aux_hidden_state_layer_ids=None), "'aux_hidden_state_layer_ids' is missing"),
        (speculators_json(aux_hidden_state_layer_ids=[0, 2]), "numbers from 1"),
        (speculators_json(draft_vocab_size=65), r"at most vocab_size \(64\), found 65"),
        (speculators_json(transformer_layer_config=None), "'transformer_layer_config' is missing"),
        (speculators_json({"attention_bias": True}), "transformer_layer_config: 'attention_bias'"),
    ],
)
def test_what_is_wrong_is_named_with_what_would_be_right(config, message):
    with pytest.raises(ConfigError, match=message):
        read(config)


@pytest.mark.parametrize("spelling", [True, "per-head", "per_head"])
def test_a_gate_per_head_has_three_spellings(spelling):
    assert read(laguna(gating=spelling)).gating == "per-head"
    assert read(laguna(gating_types=["per_head"] * 2)).gating == "per-head"
    assert read(without(laguna(), "gating")).gating == "per-head"


@pytest.mark.parametrize("spelling", [False, None, "disabled"])
def test_a_gate_can_be_off(spelling):
    assert read(laguna(gating=spelling)).gating == "off"


def test_speculators_counts_completed_layers():
    assert read(speculators_json()).target_layer_ids == (1, 3, 5)


def test_taps_may_be_given_as_counts_only():
    config = laguna({"target_layer_ids": None}, eagle_aux_hidden_state_layer_ids=[2, 4, 6])
    assert read(config).target_layer_ids == (1, 3, 5)


def test_qwen3_defaults_fill_what_a_saved_config_leaves_out():
    config = read(speculators_json(transformer_layer_config={"model_type": "qwen3", "num_hidden_layers": 2}))
    assert (config.hidden_size, config.head_dim, config.num_key_value_heads) == (4096, 128, 32)
    assert (config.vocab_size, config.rope.rope_theta) == (151936, 10000.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 48}, "'hidden_size' is 32, but the target's is 48"),
        ({"vocab_size": 128}, "'vocab_size' is 64, but the target's is 128"),
        ({"num_hidden_layers": 8}, "'num_target_layers' is 6, but the target has 8 layers"),
    ],
)
def test_a_drafter_of_another_target_is_refused(changes, message):
    config = read(laguna_json())
    config.check_target(tiny_target(), "folder")
    with pytest.raises(ConfigError, match=message):
        config.check_target(tiny_target(**changes), "folder")


def test_taps_beyond_the_target_are_refused():
    config = read(without(laguna({"target_layer_ids": [1, 6]}), "num_target_layers"))
    with pytest.raises(
        ConfigError, match=r"'target_layer_ids' \[1, 6\] must lie in 0..5: the target has 6 layers"
    ):
        config.check_target(tiny_target(), "folder")


@pytest.mark.parametrize("dflash", [laguna_dflash(), laguna_dflash() | {"causal": False}])
def test_a_written_config_says_everything_and_reads_back(dflash):
    config = read(laguna_json(dflash_config=dflash))
    written = json.loads(json.dumps(write_config(config, "laguna")))
    assert read(written) == config
    assert written["dflash_config"]["causal"] is config.causal
    assert written["sliding_windows"] == [8, 8]
    assert written["rope_theta"] == 500000.0
    assert written["rope_parameters"]["sliding_attention"]["rope_theta"] == 500000.0
    assert written["eagle_aux_hidden_state_layer_ids"] == [2, 4, 6]
    assert written["draft_vocab_size"] == written["vocab_size"]


def test_a_full_attention_config_reads_back():
    config = read(laguna_json(layer_types=FULL, gating=False))
    assert read(write_config(config, "laguna")) == config


@pytest.mark.parametrize("config", [zlab_json(), speculators_json(), speculators_json(draft_vocab_size=20)])
def test_what_the_native_format_cannot_say_is_not_written(config):
    with pytest.raises(
        ConfigError, match="cannot be written as Laguna native: it has no norm per tapped layer"
    ):
        write_config(read(config), "laguna")


def test_a_file_that_is_no_config_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        DFlashConfig.from_file(tmp_path)
    file = tmp_path / "config.json"
    file.write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        DFlashConfig.from_file(file)
    file.write_text("[]")
    with pytest.raises(CheckpointError, match="must hold a JSON object, found list"):
        DFlashConfig.from_file(tmp_path)
    file.write_text(json.dumps(laguna_json()))
    assert DFlashConfig.from_file(tmp_path) == DFlashConfig.from_file(file)


@pytest.mark.parametrize("field", ["gating", "gating_types"])
@pytest.mark.parametrize("value", [[[]], {}, 5])
def test_a_gate_of_no_known_spelling_is_named(field, value):
    if field == "gating" and value == 5:
        value = [5]
    with pytest.raises(ConfigError, match=f"'{field}'"):
        DFlashConfig.from_dict(laguna_json() | {field: value}, "config.json")
