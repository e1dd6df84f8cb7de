import json

import pytest

from lean_laguna.core.errors import DataError
from lean_laguna.train.loop import RunLog


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
