import errno
import hashlib
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from lean_laguna.core.errors import ConfigError
from lean_laguna.core.files import (
    atomic_write_json,
    atomic_write_text,
    atomic_writer,
    hold_folder,
    is_there,
    parse_json,
    remove_unfinished,
    require_writable,
    sha256_file,
    sha256_text,
    sole_writer,
)


def test_a_file_is_written_whole(tmp_path):
    atomic_write_text(tmp_path / "a", "é\n")
    assert (tmp_path / "a").read_bytes() == "é\n".encode()
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o666 & ~current_umask()


def current_umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, RuntimeError])
def test_an_interrupt_leaves_the_old_file_and_no_other(tmp_path, interrupt):
    atomic_write_text(tmp_path / "a", "old")

    def write():
        with atomic_writer(tmp_path / "a") as file:
            file.write(b"half")
            raise interrupt

    with pytest.raises(interrupt):
        write()
    assert (tmp_path / "a").read_text() == "old"
    assert os.listdir(tmp_path) == ["a"]


def test_a_link_stays_one_and_what_it_leads_to_is_written(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere/file")
    for text in ("new", "newer"):
        require_writable(tmp_path / "link")
        atomic_write_text(tmp_path / "link", text)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "elsewhere" / "file").read_text() == text
    assert len(os.listdir(tmp_path / "elsewhere")) == 1


def test_a_device_is_written_to_and_stays():
    ours, theirs = os.openpty()
    try:
        device = os.ttyname(theirs)
        require_writable(device)
        atomic_write_text(device, "said")
        assert os.read(ours, 10) == b"said"
        assert stat.S_ISCHR(os.stat(device).st_mode)
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_full_device_is_named():
    with pytest.raises(ConfigError, match="cannot write /dev/full: No space left on device"):
        atomic_write_text("/dev/full", "x")


def test_a_full_disk_names_the_file_and_leaves_no_other(tmp_path):
    def write():
        with atomic_writer(tmp_path / "a") as file:
            file.write(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ConfigError, match=r"cannot write .*a: No space left on device"):
        write()
    assert os.listdir(tmp_path) == []


def test_a_full_disk_behind_another_s_error_is_one_too(tmp_path):
    """As torch.save has it, which closes its archive on the way out and fails again."""

    def write():
        with atomic_writer(tmp_path / "a"):
            try:
                raise OSError(errno.ENOSPC, "No space left on device")
            finally:
                raise RuntimeError("unexpected pos 768 vs 662")

    with pytest.raises(ConfigError, match=r"cannot write .*a: No space left on device"):
        write()


def test_what_killed_writers_left_is_removed(tmp_path):
    with atomic_writer(tmp_path / "a") as file:
        file.write(b"x")
        (left,) = tmp_path.iterdir()
        os.link(left, tmp_path / ".a.killed.tmp")
    remove_unfinished(tmp_path)
    assert os.listdir(tmp_path) == ["a"]


def test_numbers_that_json_cannot_hold_are_refused_and_nothing_is_written(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        atomic_write_json(tmp_path / "a", {"x": float("nan")})
    assert os.listdir(tmp_path) == []


def test_an_output_path_that_cannot_be_written_is_refused_at_once(tmp_path):
    with pytest.raises(ConfigError, match="it is a folder"):
        require_writable(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        require_writable(tmp_path / "no" / "a")
    with pytest.raises(ConfigError, match="cannot write"):
        atomic_write_text(tmp_path / "no" / "a", "")
    require_writable(tmp_path / "a")


def test_hashes_are_those_of_the_bytes(tmp_path):
    data = b"x" * (3 << 20)
    (tmp_path / "a").write_bytes(data)
    assert sha256_file(tmp_path / "a") == hashlib.sha256(data).hexdigest()
    assert sha256_text("é") == hashlib.sha256("é".encode()).hexdigest()


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"a": ' + "9" * 5000 + "}", b"\xff"])
def test_json_of_others_fails_in_one_way_only(text):
    with pytest.raises(ValueError, match=r"."):
        parse_json(text)


@pytest.mark.parametrize("text", [r'"\ud800"', r'{"\uDFFF": 1}', rb'[{"a": "\ude00\ud83d"}]'])
def test_half_a_character_is_no_json(text):
    with pytest.raises(ValueError, match=r"half a character, '\\u"):
        parse_json(text)


@pytest.mark.parametrize("text", ['{"a": 1, "b": 2, "a": 3}', b'[{"x": {"a": 1, "a": 1}}]'])
def test_a_name_that_stands_twice_is_no_json(text):
    with pytest.raises(ValueError, match="'a' stands twice in one object"):
        parse_json(text)


def test_a_link_that_leads_nowhere_is_there(tmp_path):
    (tmp_path / "a").symlink_to(tmp_path / "never downloaded")
    assert is_there(tmp_path / "a")
    assert not is_there(tmp_path / "b")


def test_a_character_of_two_escapes_and_an_escaped_backslash_are_json():
    assert parse_json(r'"\ud83d\ude00"') == parse_json(rb'"\uD83D\uDE00"') == "😀"
    assert parse_json(r'"\\ud800"') == r"\ud800"


def test_a_folder_where_no_file_can_be_made_is_refused_before_the_work():
    with pytest.raises(ConfigError, match=r"cannot write /proc/result\.json"):
        require_writable("/proc/result.json")


HOLD = """
import sys, time
from pathlib import Path
from lean_laguna.core.files import hold_folder, sole_writer
place = Path(sys.argv[2])
if sys.argv[1] == "folder":
    hold_folder(place)
    print("held", flush=True)
    time.sleep(60)
with sole_writer(place):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_of_two_processes_the_second_is_told_and_a_killed_one_holds_nothing(kind, tmp_path):
    place = tmp_path / "out"
    if kind == "folder":
        place.mkdir()

    def take():
        if kind == "folder":
            hold_folder(place)
            hold_folder(place)  # one process may come twice
        else:
            with sole_writer(place):
                pass

    with subprocess.Popen([sys.executable, "-c", HOLD, kind, str(place)], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout.readline() == b"held\n"
            with pytest.raises(ConfigError, match="out: another process is writing there"):
                take()
        finally:
            other.kill()
    take()
    assert not (tmp_path / ".out.lock").exists()


def test_the_working_folder_has_one_writer_too(tmp_path, monkeypatch):
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    with sole_writer(Path()):
        assert [path.name for path in tmp_path.iterdir() if path != place] == [".here.lock"]


def test_a_place_that_nobody_can_write_is_named_before_the_work(tmp_path):
    with (
        pytest.raises(ConfigError, match=r"cannot write .*nowhere/out: No such file"),
        sole_writer(tmp_path / "nowhere" / "out"),
    ):
        pass
