"""What the disk is asked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lean_laguna.convert import read_ahead
from lean_laguna.convert.read_ahead import ReadAhead


def test_each_part_is_asked_for_once_and_no_further_ahead_than_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(read_ahead, "_CHUNK", 10)
    monkeypatch.setattr(read_ahead, "_AHEAD", 20)
    monkeypatch.setattr(os, "posix_fadvise", lambda _, first, size, how: asked.append(first), raising=False)
    (tmp_path / "file").write_bytes(bytes(55))
    ahead = ReadAhead(tmp_path / "file")
    assert asked == [0, 10]
    ahead.note(5)
    ahead.note(0)
    assert asked == [0, 10, 20]
    ahead.note(50)
    assert asked == [0, 10, 20, 30, 40, 50]
    ahead.close()


def test_a_system_that_cannot_be_asked_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fadvise", raising=False)
    (tmp_path / "file").write_bytes(bytes(5))
    ReadAhead(tmp_path / "file").close()
