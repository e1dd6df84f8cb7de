"""From recipes to a checkpoint that writes text, by commands alone."""

import importlib.util
import json
from pathlib import Path

import pytest

from lean_laguna.cli.main import main

TINY = Path(__file__).parents[1] / "unit" / "train" / "tiny.py"


@pytest.fixture(scope="module")
def tiny():
    spec = importlib.util.spec_from_file_location("tiny_for_commands", TINY)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def toml_value(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml_value(v)}" for key, v in value.items()) + "}"
    return json.dumps(value)


def write_recipe(path, content):
    path.write_text("".join(f"{key} = {toml_value(value)}\n" for key, value in content.items()))


@pytest.fixture(scope="module")
def folders(tiny, tmp_path_factory):
    base = tmp_path_factory.mktemp("train")
    recipes = base / "recipes"
    recipes.mkdir()
    common = {"batch_rows": 4, "save_every_s": 0.0}
    target = {"seq_len": 24, "val_tokens": 200, "optimizer": {"lr": 5e-3}, "model": tiny.TARGET_MODEL}
    write_recipe(recipes / "target.toml", common | target)
    selfgen = {
        "num_sequences": 8,
        "length": 24,
        "min_prefix": 3,
        "max_prefix": 8,
        "batch": 4,
        "eval_sequences": 3,
    }
    drafter = {
        "anchors": 6,
        "short_block": 4,
        "long_every": 3,
        "num_eval_draft_tokens": 3,
        "optimizer": {"lr": 5e-3},
    }
    write_recipe(
        recipes / "dflash.toml", common | drafter | {"selfgen": selfgen, "model": tiny.DRAFTER_MODEL}
    )
    tiny.write_data(base / "data")
    return base


def run(folders, capsys, stage, *words):
    argv = ["train", stage, "--recipes", folders / "recipes", "--data", folders / "data", "--device", "cpu"]
    status = main([*map(str, argv), "--compile", "off", *map(str, words)])
    return status, capsys.readouterr()


def test_a_target_and_a_drafter_are_trained_and_then_write_text_together(folders, capsys):
    target, drafter = folders / "target", folders / "drafter"
    status, captured = run(folders, capsys, "target", "--steps", "3", "--out", target, "--json")
    assert status == 0
    line = json.loads(captured.out)
    assert line["stage"] == "target"
    assert line["val_bits_per_char"] > 0
    status, captured = run(
        folders, capsys, "drafter", "--steps", "2", "--target", target, "--out", drafter, "--json"
    )
    assert status == 0
    assert json.loads(captured.out)["stage"] == "drafter"
    words = ["parity", "--model", target, "--drafter", drafter, "--prompts", "trivial", "--num-prompts", "1"]
    assert main([*map(str, words), "--max-tokens", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parity"]["num_mismatches"] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train"], "one of tokenizer, target, drafter"),
        (["train", "targt"], "did you mean 'target'?"),
        (["train", "target", "--data", "/nowhere"], "lean-laguna train tokenizer"),
        (["train", "target", "--seconds", "5", "--steps", "5"], "both given"),
        (["train", "tokenizer", "--recipes", "/nowhere"], "/nowhere/corpus.toml"),
    ],
)
def test_a_mistake_is_one_line(words, message, capsys):
    assert main(words) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


def test_an_unknown_key_of_a_recipe_is_named(folders, tmp_path, capsys):
    recipe = (folders / "recipes" / "target.toml").read_text()
    (tmp_path / "target.toml").write_text("bach_rows = 3\n" + recipe)
    argv = ["train", "target", "--recipes", str(tmp_path), "--data", str(folders / "data")]
    assert main(argv) == 2
    assert "unknown key 'bach_rows'; did you mean 'batch_rows'?" in capsys.readouterr().err
