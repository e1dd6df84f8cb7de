import pytest

from lean_laguna.core.errors import ConfigError
from lean_laguna.train.run_state import STATE, TEXT, open_run

MINE = {"recipe": {"optimizer": {"lr": 0.003, "betas": (0.9, 0.95)}}, "data": {"train": "x"}}
OTHER = {"recipe": {"optimizer": {"lr": 0.002, "betas": (0.9, 0.95)}}, "data": {"train": "x"}}


@pytest.fixture
def work(tmp_path):
    folder = tmp_path / "work"
    assert not open_run(folder, MINE)
    (folder / STATE).write_bytes(b"state")
    (folder / TEXT).write_bytes(b"text")
    return folder


def test_the_same_run_goes_on(work):
    assert open_run(work, MINE)
    assert open_run(work, MINE, "yes")


def test_another_recipe_is_refused_and_the_difference_named(work):
    with pytest.raises(ConfigError, match=r"recipe\.optimizer\.lr was 0\.003 and is 0\.002.*--resume no"):
        open_run(work, OTHER)
    assert (work / STATE).exists()


def test_a_new_start_removes_the_old_state(work):
    assert not open_run(work, OTHER, "no")
    assert not (work / STATE).exists()
    assert not (work / TEXT).exists()
    assert not open_run(work, OTHER)


def test_text_outlives_a_run_killed_before_its_first_state(work):
    (work / STATE).unlink()
    assert not open_run(work, MINE)
    assert (work / TEXT).exists()
    assert not open_run(work, OTHER)
    assert not (work / TEXT).exists()


@pytest.mark.parametrize("resume", ["auto", "no"])
def test_one_of_several_processes_changes_files(work, monkeypatch, resume):
    (work / STATE).unlink()
    unfinished = work / ".run.json.x.tmp"  # the first process is writing it
    unfinished.write_text("{")
    before = (work / "run.json").read_bytes()
    monkeypatch.setenv("RANK", "1")
    assert not open_run(work, OTHER, resume)
    assert unfinished.exists()
    assert (work / TEXT).exists()
    assert (work / "run.json").read_bytes() == before


def test_insisting_on_a_state_needs_one(tmp_path):
    with pytest.raises(ConfigError, match="no state to go on from"):
        open_run(tmp_path / "empty", MINE, "yes")


def test_a_state_of_unknown_origin_is_refused(work):
    (work / "run.json").write_text("{half")
    with pytest.raises(ConfigError, match=r"run\.json' is missing or damaged.*--resume no"):
        open_run(work, MINE)
