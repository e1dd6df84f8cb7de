import pytest

from lean_laguna.core.drafter_config import DFlashConfig
from lean_laguna.core.errors import ConfigError
from support.drafters import deepspec_json, dspark_json, laguna_json, speculators_json, zlab_json

# What transformers and publishers write beside what is used.
SAVED = {
    "_name_or_path": "",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "eos_token_id": [2, 24],
    "pad_token_id": None,
    "chunk_size_feed_forward": 0,
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "id2label": {"0": "LABEL_0"},
    "initializer_range": 0.02,
    "is_encoder_decoder": False,
    "max_window_layers": 28,
    "output_attentions": False,
    "problem_type": None,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "transformers_version": "5.24.0",
    "use_cache": True,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "training_note": "trained on a Sunday",
}
FORMATS = {
    "laguna": laguna_json,
    "dspark": dspark_json,
    "z-lab": zlab_json,
    "speculators": speculators_json,
    "deepspec": deepspec_json,
}


@pytest.mark.parametrize("name", FORMATS)
def test_what_others_write_beside_it_is_taken(name):
    plain = FORMATS[name]()
    assert DFlashConfig.from_dict({**SAVED, **plain}) == DFlashConfig.from_dict(plain)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"hiden_size": 64}, "unknown key 'hiden_size'; did you mean 'hidden_size'"),
        ({"mask_token": 12, "mask_token_ids": 3}, "did you mean 'mask_token_id'"),
        ({"use_cache": "yes"}, "'use_cache' must be true or false, found 'yes'"),
        ({"initializer_range": -1}, "'initializer_range' must be a finite number from 0, found -1"),
        ({"max_window_layers": "all"}, "'max_window_layers' must be a whole number"),
        ({"eos_token_id": "</s>"}, "'eos_token_id' must be a token id, or a list of them, found '</s>'"),
        ({"num_experts": -3}, "'num_experts' must be a whole number from 0, found -3"),
        ({"markov_rank": "wide"}, "'markov_rank' must be a whole number"),
        ({"mlp_layer_types": ["dense", "sparse"]}, "'dense' for all layers of a drafter"),
        ({"speculators_config": 7}, "'speculators_config' must be a JSON object, found 7"),
    ],
)
def test_slips_and_nonsense_are_named_used_or_not(name, change, told):
    with pytest.raises(ConfigError, match=told):
        DFlashConfig.from_dict({**FORMATS[name](), **change}, "config.json")


def test_sections_that_configure_drafting_take_their_own_keys_only():
    given = laguna_json()
    given["dflash_config"] = given["dflash_config"] | {"temperature_of_tea": 3}
    with pytest.raises(ConfigError, match=r"config.json: dflash_config: unknown key 'temperature_of_tea'"):
        DFlashConfig.from_dict(given, "config.json")
    given = dspark_json()
    given["dspark_config"] = given["dspark_config"] | {"markov_rnak": 4}
    with pytest.raises(ConfigError, match="'markov_rnak'; did you mean 'markov_rank'"):
        DFlashConfig.from_dict(given)
    given = speculators_json({"hidden_sizes": 4})
    with pytest.raises(ConfigError, match="transformer_layer_config: unknown key 'hidden_sizes'"):
        DFlashConfig.from_dict(given)
