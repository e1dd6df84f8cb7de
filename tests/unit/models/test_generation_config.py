import json

import pytest

from lean_laguna.core.errors import CheckpointError
from lean_laguna.models.generation_config import GenerationConfig

PUBLISHED = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 20,
    "min_p": 0.0,
    "max_new_tokens": 32768,
    "eos_token_id": [2, 24],
    "do_sample": True,
    "tool_call_parser": "poolside_v1",
    "reasoning_parser": "poolside_v1",
    "default_chat_template_kwargs": {"enable_thinking": True},
    "transformers_version": "5.0.0",
}


def test_the_published_block_is_read(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps(PUBLISHED))
    config = GenerationConfig.from_dir(tmp_path)
    assert config.sampling_defaults() == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 20,
        "min_p": 0.0,
        "max_tokens": 32768,
    }
    assert config.eos_token_ids == (2, 24)
    assert config.default_chat_template_kwargs == {"enable_thinking": True}
    assert config.reasoning_parser == config.tool_call_parser == "poolside_v1"


def test_a_folder_without_the_file_recommends_nothing(tmp_path):
    assert GenerationConfig.from_dir(tmp_path).sampling_defaults() == {}


def test_sampling_turned_off_means_greedy():
    assert GenerationConfig.from_dict({"do_sample": False, "temperature": 0.7}, "f").temperature == 0


def test_one_stop_id_or_many_are_accepted():
    assert GenerationConfig.from_dict({"eos_token_id": 2}, "f").eos_token_ids == (2,)
    assert GenerationConfig.from_dict({"eos_token_id": [24, 2, 24]}, "f").eos_token_ids == (24, 2)
    assert GenerationConfig.from_dict({"eos_token_id": None}, "f").eos_token_ids == ()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", "hot"),
        ("top_k", 2.5),
        ("top_p", True),
        ("max_new_tokens", []),
        ("reasoning_parser", 3),
        ("default_chat_template_kwargs", [1]),
        ("do_sample", "no"),
        ("eos_token_id", 10**400),
    ],
)
def test_a_value_of_the_wrong_type_names_file_and_key(key, value):
    with pytest.raises(CheckpointError, match=f"gen.json.*'{key}'"):
        GenerationConfig.from_dict({key: value}, "gen.json")


@pytest.mark.parametrize(("key", "value"), [("temperature", -1), ("top_p", 0), ("max_new_tokens", 0)])
def test_a_value_out_of_range_names_the_file(key, value):
    with pytest.raises(CheckpointError, match=r"^gen\.json: \w+ must be"):
        GenerationConfig.from_dict({key: value}, "gen.json")


@pytest.mark.parametrize("content", ["[1]", "{", "\udcff"])
def test_a_damaged_file_is_named(tmp_path, content):
    (tmp_path / "generation_config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        GenerationConfig.from_dir(tmp_path)


def test_a_link_to_a_file_that_never_came_is_named_not_left_out(tmp_path):
    (tmp_path / "generation_config.json").symlink_to(tmp_path / "blobs" / "abc")
    with pytest.raises(
        CheckpointError, match=r"generation_config\.json: not readable as JSON: .*No such file"
    ):
        GenerationConfig.from_dir(tmp_path)
