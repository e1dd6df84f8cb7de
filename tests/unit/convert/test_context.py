"""256K and 1M, held against the published constants and frequencies, and against every near miss."""

import json
import math

import pytest

from lean_laguna.convert.context import SETTINGS, change_context, convert_context
from lean_laguna.core.errors import ConfigError
from lean_laguna.core.model_config import LagunaConfig
from lean_laguna.models.rope import inverse_frequencies
from lean_laguna.models.shapes import laguna_shape
from support.sparse_checkpoints import write_sparse_file

# Frequencies 8, 12, 16 and 31 of the published configs, worked out in double precision.
FREQUENCIES = {
    "256k": (0.0376060309, 0.00493774175, 0.000348642927, 9.41830673e-08),
    "1m": (0.0376060309, 0.00488076781, 0.000322862992, 2.35457668e-08),
}


def published(name):
    """Return the config.json of Laguna-S-2.1 at a context, with a key that is of no use here."""
    given = laguna_shape("laguna-s-2.1").to_dict() | {"transformers_version": "5.0.0"}
    setting = SETTINGS[name]
    given["rope_parameters"]["full_attention"] |= {
        "factor": setting.factor,
        "attention_factor": setting.attention_factor,
    }
    return given | {"max_position_embeddings": setting.max_position_embeddings}


def folder_of(path, given):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(given, indent=2) + "\n")
    (path / "tokenizer.json").write_text("{}")
    write_sparse_file(path / "model.safetensors", [("model.norm.weight", "BF16", (3072,))])
    return path


@pytest.mark.parametrize(("before", "after"), [("256k", "1m"), ("1m", "256k")])
def test_the_other_context_is_the_other_published_config(before, after):
    change = change_context(published(before), after, "config.json")
    assert change.config == published(after)
    assert (change.before, change.after) == (before, after)
    rope = LagunaConfig.from_dict(change.config).full_rope
    found = inverse_frequencies(rope, 128)
    assert [found[i].item() for i in (8, 12, 16, 31)] == pytest.approx(FREQUENCIES[after], rel=1e-6)
    assert rope.attention_scaling == pytest.approx(0.1 * math.log(rope.factor) + 1, rel=1e-15)


def test_there_and_back_is_the_same_file_byte_for_byte(tmp_path):
    source = folder_of(tmp_path / "a", published("256k"))
    convert_context(source, tmp_path / "b", "1m")
    convert_context(tmp_path / "b", tmp_path / "c", "256k")
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        assert (tmp_path / "c" / name).read_bytes() == (source / name).read_bytes()
    assert (tmp_path / "b" / "config.json").read_bytes() != (source / "config.json").read_bytes()
    # The weights are on the disk once.
    assert (tmp_path / "b" / "model.safetensors").stat().st_ino == (
        source / "model.safetensors"
    ).stat().st_ino


def test_in_place_changes_the_config_alone(tmp_path):
    source = folder_of(tmp_path / "a", published("256k"))
    convert_context(source, None, "1m")
    assert json.loads((source / "config.json").read_text()) == published("1m")
    assert sorted(path.name for path in source.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_an_attention_factor_left_to_the_formula_is_spelt_out():
    given = published("256k")
    del given["rope_parameters"]["full_attention"]["attention_factor"]
    assert change_context(given, "1m", "config.json").config == published("1m")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (laguna_shape("laguna-xs-2.1").to_dict(), "whose hidden_size is 3072; found 2048"),
        (published("256k") | {"max_position_embeddings": 131072}, "are 131072, 32 and 1.34657"),
        (published("256k") | {"max_position_embeddings": 1048576}, "are 1048576, 32 and 1.34657"),
        (published("1m"), "the context is 1m already"),
    ],
)
def test_what_is_not_the_published_model_is_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        change_context(given, "1m", "config.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("factor", 64.0),
        ("attention_factor", 1.0),
        ("beta_fast", 64.0),
        ("original_max_position_embeddings", 4096),
    ],
)
def test_another_rotary_embedding_is_refused(key, value, tmp_path):
    given = published("256k")
    given["rope_parameters"]["full_attention"][key] = value
    source = folder_of(tmp_path / "a", given)
    with pytest.raises(ConfigError, match=str(value).removesuffix(".0")):
        convert_context(source, tmp_path / "b", "1m")
    assert not (tmp_path / "b").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_folder_that_exists_is_left_alone(tmp_path):
    source = folder_of(tmp_path / "a", published("256k"))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine").write_text("")
    with pytest.raises(ConfigError, match="exists already"):
        convert_context(source, tmp_path / "b", "1m")
    assert [path.name for path in (tmp_path / "b").iterdir()] == ["mine"]
