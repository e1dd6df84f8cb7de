import json
import subprocess
import sys
import time

import pytest
import torch

from lean_laguna.core.errors import DataError
from lean_laguna.train import loop
from lean_laguna.train.loop import RunLog, train
from lean_laguna.train.recipe import OptimizerRecipe
from lean_laguna.train.run_state import STATE
from lean_laguna.train.schedule import Budget


def written(path, *steps):
    log = RunLog(path, echo=lambda kind, values: None)
    log.open(is_resumed=False)
    log.write("start", parameters=3)
    for step in steps:
        log.write("step", step=step, loss=1.0 / step)
    return log


def events(path):
    return [(row["event"], row.get("step")) for row in map(json.loads, path.read_text().splitlines())]


def test_a_row_that_was_cut_off_does_not_spoil_the_next(tmp_path):
    path = tmp_path / "log.jsonl"
    log = written(path, 1, 2)
    path.write_bytes(path.read_bytes()[:-9])
    log.open(is_resumed=True)
    log.write("resume", step=1)
    assert events(path) == [("start", None), ("step", 1), ("resume", 1)]


def test_steps_that_are_taken_again_stand_in_the_log_once(tmp_path):
    log = written(tmp_path / "log.jsonl", 1, 2, 3, 4)
    log.write("val", step=4)
    log.open(is_resumed=True)
    log.write("start", parameters=3)
    log.go_back_to(2)
    assert events(log.path) == [("start", None), ("step", 1), ("step", 2), ("start", None)]


@pytest.mark.parametrize("line", ["{", "3", "{}", "\0"])
def test_a_damaged_log_is_named_before_the_run_goes_on(line, tmp_path):
    log = written(tmp_path / "log.jsonl", 1)
    with log.path.open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(DataError, match=r"log\.jsonl', line 3: not an event .* --resume no"):
        log.open(is_resumed=True)


def test_a_new_run_drops_the_log_and_a_silent_one_leaves_it(tmp_path):
    log = written(tmp_path / "log.jsonl", 1)
    silent = RunLog(log.path, is_silent=True)
    silent.open(is_resumed=False)
    silent.go_back_to(0)
    assert len(events(log.path)) == 2
    log.open(is_resumed=False)
    assert not log.path.exists()


class OneWeight:
    """A task whose loss is not finite at some steps, the first time or every time that they are taken."""

    tokens_per_step = 1

    def __init__(self, bad_steps, *, is_lasting):
        self.module = torch.nn.Linear(1, 1, bias=False)
        self.bad_steps, self.is_lasting, self.exported = set(bad_steps), is_lasting, []

    def loss(self, step):
        is_bad = step in self.bad_steps
        if is_bad and not self.is_lasting:
            self.bad_steps.remove(step)
        return self.module.weight.square().sum() * (float("nan") if is_bad else 1.0)

    def details(self):
        return {}

    def after_step(self, progress):
        pass

    def validate(self):
        return {}

    def export(self):
        self.exported.append(self.module.weight.item())


def run(task, folder, **limits):
    log = RunLog(folder / "log.jsonl", echo=lambda kind, values: None)
    log.open(is_resumed=False)
    limits = {"val_every_s": 1e9, "save_every_s": 1e9, "log_every": 4} | limits
    train(task, OptimizerRecipe(), Budget(steps=7), folder, log, **limits)
    return log


def test_weights_that_the_last_steps_spoilt_are_neither_exported_nor_saved(tmp_path):
    task = OneWeight([5], is_lasting=True)  # after the last step of the log that 4 divides
    with pytest.raises(DataError, match="the loss is nan at step 7; lower 'lr' in the recipe"):
        run(task, tmp_path, save_every_s=1e9)
    assert not task.exported
    assert not (tmp_path / STATE).exists()


def test_a_loss_that_is_not_finite_near_the_end_goes_back_to_the_last_state(tmp_path):
    task = OneWeight([5], is_lasting=False)
    log = run(task, tmp_path, save_every_s=0.0)
    assert all(weight == weight for weight in task.exported)
    assert events(log.path) == [("step", 1), ("step", 4), ("rollback", 4), ("final", 7)]
    held = torch.load(tmp_path / STATE, weights_only=True)
    assert (held["state"]["step"], held["state"]["lr_scale"]) == (7, 0.5)


def test_what_a_killed_run_left_half_written_is_cleared_away(tmp_path):
    (tmp_path / ".model.safetensors.x.tmp").write_bytes(b"half")
    (tmp_path / "model.safetensors").write_bytes(b"whole")
    RunLog(tmp_path / "log.jsonl", is_silent=True).open(is_resumed=True)  # another process's to do
    assert len(list(tmp_path.iterdir())) == 2
    RunLog(tmp_path / "log.jsonl").open(is_resumed=True)
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]


def test_two_runs_do_not_share_the_folder_of_their_checkpoint(tmp_path):
    """With a work folder each, the one would drop the other's log and mix its files into its checkpoint."""
    log = RunLog(tmp_path / "log.jsonl", echo=lambda kind, values: None)
    log.open(is_resumed=False)
    log.write("start")
    code = (
        "import sys, pathlib; from lean_laguna.train.loop import RunLog; "
        "RunLog(pathlib.Path(sys.argv[1])).open(is_resumed=False)"
    )
    words = [sys.executable, "-c", code, str(log.path)]
    other = subprocess.run(words, capture_output=True, text=True, check=False)
    assert f"{tmp_path}: another process is writing there" in other.stderr
    assert log.path.exists()


def test_slow_steps_are_told_and_saved_whatever_the_log_asks_for(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "_SLOW_SECONDS", 0.0)  # every step takes longer
    task = OneWeight([], is_lasting=False)
    log = run(task, tmp_path, save_every_s=0.0)
    assert events(log.path) == [*(("step", step) for step in range(1, 8)), ("final", 7)]
    assert len(task.exported) == 7


def test_what_is_measured_between_steps_does_not_count_as_theirs(tmp_path):
    task = OneWeight([], is_lasting=False)
    task.validate = lambda: time.sleep(0.1) or {}
    log = run(task, tmp_path, val_every_s=0.0, log_every=1)
    steps = [row for row in map(json.loads, log.path.read_text().splitlines()) if row["event"] == "step"]
    assert len(steps) == 7
    assert all(row["tok_per_s"] > 10 for row in steps)  # 0.1 s each, with a validation in it
