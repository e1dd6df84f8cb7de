import pytest

from lean_laguna.core.errors import ConfigError
from lean_laguna.core.rope_config import RopeConfig, read_ropes

YARN = {
    "rope_type": "yarn",
    "rope_theta": 500000.0,
    "partial_rotary_factor": 0.5,
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 64.0,
    "beta_slow": 1.0,
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
FULL, SLIDING = RopeConfig.from_dict(YARN, "full"), RopeConfig.from_dict(PLAIN, "sliding")

SPELLINGS = {
    "nested": {"rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN}},
    "nested, global": {"rope_parameters": {"global_attention": YARN, "sliding_attention": PLAIN}},
    "nested with a loose key, as XS.2": {
        "rope_parameters": {
            "original_max_position_embeddings": 4096,
            "full_attention": YARN,
            "sliding_attention": PLAIN,
        }
    },
    "loose key fills a gap": {
        "rope_parameters": {
            "original_max_position_embeddings": 4096,
            "full_attention": {k: v for k, v in YARN.items() if k != "original_max_position_embeddings"},
            "sliding_attention": PLAIN,
        }
    },
    "flat": {"rope_parameters": YARN, "swa_rope_parameters": PLAIN},
    "version 4": {
        "rope_theta": 500000.0,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {
            "type": "yarn",
            **{
                k: v for k, v in YARN.items() if k not in ("rope_type", "rope_theta", "partial_rotary_factor")
            },
        },
        "swa_rope_parameters": PLAIN,
    },
    "partial on top": {
        "partial_rotary_factor": 0.5,
        "rope_parameters": {k: v for k, v in YARN.items() if k != "partial_rotary_factor"},
        "swa_rope_parameters": PLAIN,
    },
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_means_the_same(spelling):
    assert read_ropes(SPELLINGS[spelling], "config.json", True) == (FULL, SLIDING)


def test_without_any_key_transformers_defaults_hold():
    full, sliding = read_ropes({}, "config.json", True)
    assert (full.rope_theta, full.partial_rotary_factor, full.rope_type) == (500000.0, 0.5, "default")
    assert (sliding.rope_theta, sliding.partial_rotary_factor, sliding.rope_type) == (10000.0, 1.0, "default")


def test_null_is_taken_as_transformers_does_and_said():
    for given in (
        {"rope_parameters": None},
        {"rope_parameters": {"full_attention": None, "sliding_attention": PLAIN}},
    ):
        with pytest.warns(
            UserWarning, match="c.json: 'rope_parameters' is null for full_attention; taken as .* 500000, 50%"
        ) as said:
            assert read_ropes(given, "c.json", False) == read_ropes({}, "c.json", False)
        assert len(said) == 1


def test_one_embedding_for_both_layer_types_warns():
    with pytest.warns(UserWarning, match="swa_rope_parameters"):
        full, sliding = read_ropes({"rope_parameters": YARN}, "config.json", True)
    assert full == sliding == FULL
    assert read_ropes({"rope_parameters": YARN}, "config.json", False)[0] == FULL


def test_an_explicit_attention_factor_replaces_the_formula():
    # S-2.1 spells out 0.1 ln(32) + 1 and, at a million tokens, 0.1 ln(128) + 1.
    assert FULL.attention_scaling == pytest.approx(1.3465735902799727, abs=1e-15)
    long = RopeConfig.from_dict({**YARN, "factor": 128.0}, "x")
    assert long.attention_scaling == pytest.approx(1.4852030263919618, abs=1e-15)
    assert RopeConfig.from_dict({**YARN, "attention_factor": 1.0}, "x").attention_scaling == 1.0
    assert RopeConfig.from_dict({**YARN, "factor": 1.0}, "x").attention_scaling == 1.0
    both = RopeConfig.from_dict({**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, "x")
    assert both.attention_scaling == 1.0
    assert SLIDING.attention_scaling == 1.0


@pytest.mark.parametrize(
    "given", [YARN, PLAIN, {**YARN, "attention_factor": 1.25}, {**YARN, "truncate": False}]
)
def test_what_is_written_reads_back(given):
    rope = RopeConfig.from_dict(given, "x")
    assert RopeConfig.from_dict(rope.to_dict(), "x") == rope


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({**YARN, "rope_type": "linear"}, "'rope_type' must be 'default' or 'yarn', found 'linear'"),
        ({**PLAIN, "rope_theta": None}, "'rope_theta' is missing"),
        ({**PLAIN, "rope_theta": -1.0}, "'rope_theta' must be a number above 0, found -1.0"),
        ({**PLAIN, "partial_rotary_factor": 1.5}, r"must be in \(0, 1\], found 1.5"),
        ({**YARN, "factor": None}, "'factor' is missing"),
        ({**YARN, "original_max_position_embeddings": None}, "whole number from 1 for yarn, found None"),
        (
            {**YARN, "attention_factor": float("nan")},
            "'attention_factor' must be a number above 0, found nan",
        ),
        (
            {**YARN, "attention_factor": 9e18},
            r"rope: 'attention_factor' must be a number from 0\.01 to 100 \(YaRN's formula gives 1\.\d+\), "
            r"found 9e\+18",
        ),
        ({**YARN, "attention_factor": 1e-9}, r"'attention_factor' .*, found 1e-09"),
        (
            {**YARN, "mscale": 9e18, "mscale_all_dim": 1.0},
            r"'mscale' 9e\+18 over 'mscale_all_dim' 1\.0 must give a factor from 0\.01 to 100",
        ),
        ({**YARN, "betafast": 1.0}, "unknown key 'betafast'"),
        ({**YARN, "factor": 0.5}, "'factor' must be a number from 1, found 0.5"),
        ({**YARN, "truncate": "no"}, "'truncate' must be true or false, found 'no'"),
        ({**YARN, "rope_theta": 1}, "'rope_theta' must be a number above 1, found 1.0"),
        (
            {k: v for k, v in YARN.items() if k != "rope_type"},
            "'rope_type' is missing; with 'factor' it must be 'yarn'",
        ),
    ],
)
def test_wrong_parameters_are_named(given, message):
    with pytest.raises(ConfigError, match=message):
        RopeConfig.from_dict(given, "config.json: rope")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_parameters": 3}, "'rope_parameters' must be an object, found 3"),
        ({"rope_parameters": {"local_attention": PLAIN}}, "unknown layer type 'local_attention'"),
        ({"rope_scaling": {"type": "yarn"}}, "'rope_theta' is missing"),
        ({"rope_scaling": "yarn"}, "'rope_scaling' must be an object, found 'yarn'"),
        ({"rope_theta": 1e4, "swa_rope_parameters": [1]}, "'swa_rope_parameters' must be an object"),
        ({"rope_parameters": {"full_attention": {}}}, "full_attention: 'rope_theta' is missing"),
    ],
)
def test_wrong_shapes_of_the_whole_are_named(config, message):
    with pytest.raises(ConfigError, match=message):
        read_ropes(config, "config.json", True)


@pytest.mark.parametrize("field", ["rope_theta", "factor", "original_max_position_embeddings", "beta_fast"])
def test_a_number_beyond_any_float_is_named(field):
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}
    with pytest.raises(ConfigError, match=f"'{field}'"):
        RopeConfig.from_dict(yarn | {field: 10**400}, "config.json")


@pytest.mark.parametrize("name", ["full_attention", "global_attention", "sliding_attention"])
@pytest.mark.parametrize("found", [False, 0, "", [], "yarn", 3, [YARN]])
def test_a_layer_type_that_is_no_object_is_named(name, found):
    given = {"rope_parameters": {"full_attention": YARN, "sliding_attention": PLAIN} | {name: found}}
    if name == "global_attention":
        del given["rope_parameters"]["full_attention"]
    with pytest.raises(ConfigError, match=f"c.json: rope_parameters: '{name}' must be an object, found"):
        read_ropes(given, "c.json", True)


NESTED = SPELLINGS["nested"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (NESTED | {"rope_scaling": {"type": "yarn", "factor": 8.0}}, "'factor' is 8.0 and 32.0"),
        (NESTED | {"swa_rope_parameters": {"rope_theta": 5e5}}, "'rope_theta' is 500000.0 and 10000.0"),
        ({"rope_parameters": YARN, "rope_scaling": {"rope_type": "default"}}, "is 'default' and 'yarn'"),
    ],
)
def test_two_places_that_contradict_each_other_are_named(config, message):
    with pytest.raises(ConfigError, match=message):
        read_ropes(config, "c.json", True)


@pytest.mark.parametrize(
    "config",
    [
        NESTED | {"rope_scaling": NESTED["rope_parameters"]},
        NESTED | {"rope_scaling": {"type": "yarn", "factor": 32.0}, "swa_rope_parameters": PLAIN},
        {"rope_parameters": {"full_attention": YARN}, "swa_rope_parameters": PLAIN},
    ],
)
def test_two_places_that_agree_are_one(config):
    assert read_ropes(config, "c.json", True) == (FULL, SLIDING)
