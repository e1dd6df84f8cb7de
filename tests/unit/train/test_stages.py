import json
import shutil
import time
from dataclasses import replace

import pytest
import torch

from lean_laguna.core.errors import ConfigError, DataError
from lean_laguna.core.provenance import checkpoint_hash
from lean_laguna.train import stages
from lean_laguna.train.run_state import STATE, TEXT
from lean_laguna.train.stages import StageOptions, run_drafter, run_evaluation, run_target
from support.training import DRAFTER_MODEL, selfgen_recipe, write_recipes

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def recipes(tmp_path_factory):
    return write_recipes(tmp_path_factory.mktemp("recipes"))


@pytest.fixture(scope="module")
def target(data, recipes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    run_target(recipes / "target.toml", options(data, folder, steps=2))
    return folder / "out"


def logged(folder):
    lines = (folder / "out" / "train_log.jsonl").read_text().splitlines()
    return [json.loads(line)["event"] for line in lines]


def options(data, folder, **changes):
    plain = StageOptions(
        data=data,
        out=folder / "out",
        work=folder / "work",
        device=CPU,
        started=time.monotonic(),
        report=lambda line: None,
        echo=lambda kind, values: None,
    )
    return replace(plain, **changes)


def test_a_target_is_whole_with_its_tokenizer_and_log(target):
    names = {file.name for file in target.iterdir()}
    assert {"config.json", "tokenizer.json", "chat_template.jinja", "train_log.jsonl"} <= names


def test_a_drafter_names_its_target_and_its_text_is_kept(data, recipes, target, tmp_path, monkeypatch):
    chosen = options(data, tmp_path, steps=2)
    figures = run_drafter(recipes / "dflash.toml", target, chosen, generate_seconds=60)
    assert figures["greedy_tau_chain"] >= 1.0
    assert figures["sampled_argmax_ceiling_tau_chain"] >= 1.0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["provenance"] == {"target_sha256": checkpoint_hash(target)}
    assert (tmp_path / "work" / TEXT).exists()
    monkeypatch.setattr(stages, "generate_text", None)  # is not called again
    run_drafter(recipes / "dflash.toml", target, replace(chosen, steps=3), generate_seconds=60)
    events = logged(tmp_path)
    assert events.count("start") == 2
    assert "resume" in events


def test_a_new_start_drops_state_and_log(data, recipes, tmp_path):
    chosen = options(data, tmp_path, steps=2)
    run_target(recipes / "target.toml", chosen)
    run_target(recipes / "target.toml", replace(chosen, resume="no"))
    events = logged(tmp_path)
    assert events.count("start") == 1
    assert "resume" not in events
    assert (tmp_path / "work" / STATE).exists()


def test_a_drafter_that_does_not_fit_is_refused_before_the_text(data, target, tmp_path, monkeypatch):
    recipes = write_recipes(tmp_path / "recipes", drafter_model=DRAFTER_MODEL | {"hidden_size": 24})
    monkeypatch.setattr(stages, "generate_text", None)
    with pytest.raises(ConfigError, match="hidden_size"):
        run_drafter(recipes / "dflash.toml", target, options(data, tmp_path, steps=1), generate_seconds=60)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"length": 129}, "'selfgen': 'length' is 129, and the target's context holds 128 tokens"),
        (
            {"length": 11},
            "'length' less 'max_prefix' is 3; evaluation with 'num_eval_draft_tokens' = 3 needs more",
        ),
    ],
)
def test_text_that_cannot_be_written_or_evaluated_is_refused_before_it_is(
    data, recipes, target, tmp_path, monkeypatch, changes, message
):
    loaded = replace(
        stages.load_recipe(stages.DrafterRecipe, recipes / "dflash.toml"), selfgen=selfgen_recipe(**changes)
    )
    monkeypatch.setattr(stages, "load_recipe", lambda kind, path: loaded)
    monkeypatch.setattr(stages, "load_laguna", lambda *a, **k: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match=message):
        run_drafter(recipes / "dflash.toml", target, options(data, tmp_path, steps=1), generate_seconds=60)


def test_a_pair_is_evaluated_as_training_does(data, recipes, target, tmp_path):
    chosen = options(data, tmp_path, steps=2)
    trained = run_drafter(recipes / "dflash.toml", target, chosen, generate_seconds=60)
    recipe, how = recipes / "dflash.toml", {"device": CPU, "report": lambda line: None}
    found = run_evaluation(target, tmp_path / "out", data, recipe, num_sequences=None, **how)
    assert found["val_bits_per_char"] > 0
    assert found["greedy_distinct_8gram"] == trained["greedy_distinct_8gram"]
    assert set(found) - set(trained) == {n for n in found if n.startswith(("val_", "max_vio", "dead_"))}
    alone = run_evaluation(target, None, data, recipe, num_sequences=1, **how)
    assert not any("tau" in name for name in alone)


def test_data_without_a_tokenizer_is_refused_at_once(data, recipes, tmp_path):
    half = tmp_path / "data"
    shutil.copytree(data, half)
    shutil.rmtree(half / "tokenizer")
    with pytest.raises(DataError, match=r"no tokenizer\.json.*train corpus"):
        run_target(recipes / "target.toml", options(half, tmp_path, steps=1))
    assert not (tmp_path / "work").exists()


def test_the_budget_covers_the_whole_stage(data, tmp_path):
    chosen = options(data, tmp_path, seconds=100.0, started=time.monotonic() - 20)
    assert chosen.training_seconds() == pytest.approx(50.0, abs=1.0)
    assert options(data, tmp_path, steps=3).training_seconds() is None
