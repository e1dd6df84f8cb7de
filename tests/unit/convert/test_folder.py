import pytest

from lean_laguna.convert.folder import link_or_copy, whole_folder
from lean_laguna.core.errors import ConfigError


def test_a_folder_appears_when_all_is_written(tmp_path):
    with whole_folder(tmp_path / "a") as folder:
        (folder / "file").write_text("x")
        assert not (tmp_path / "a").exists()
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "file"]


@pytest.mark.parametrize("mishap", [RuntimeError, KeyboardInterrupt])
def test_nothing_is_left_of_one_that_failed(mishap, tmp_path):
    def fail():
        with whole_folder(tmp_path / "a") as folder:
            (folder / "file").write_text("x")
            raise mishap

    with pytest.raises(mishap):
        fail()
    assert not list(tmp_path.iterdir())


def test_what_a_killed_run_left_is_replaced(tmp_path):
    (tmp_path / ".a.partial").mkdir()
    (tmp_path / ".a.partial" / "old").write_text("x")
    with whole_folder(tmp_path / "a") as folder:
        (folder / "new").write_text("x")
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "new"]


def test_an_empty_folder_is_filled_and_a_missing_parent_is_named(tmp_path):
    (tmp_path / "a").mkdir()
    with whole_folder(tmp_path / "a") as folder:
        (folder / "file").write_text("x")
    with pytest.raises(ConfigError, match="none does not exist"), whole_folder(tmp_path / "none" / "b"):
        pass


def test_where_a_disk_cannot_link_a_file_is_copied(tmp_path, monkeypatch):
    (tmp_path / "a").write_text("x")

    def cannot(*_):
        raise OSError("no links here")

    monkeypatch.setattr("os.link", cannot)
    link_or_copy(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_text() == "x"
