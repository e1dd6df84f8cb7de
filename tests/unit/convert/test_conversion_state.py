"""What is remembered of a conversion."""

from __future__ import annotations

from pathlib import Path

from lean_laguna.convert.conversion_state import ConversionState, size_of
from lean_laguna.convert.weight_encoder import WeightError


def saved(folder: Path) -> ConversionState:
    folder.mkdir()
    (folder / "a").write_bytes(b"123")
    state = ConversionState("mine", {"a": 3, "b": 5}, {"fc": WeightError(4.0, 1.0, 0.5, 2)})
    state.save(folder)
    return state


def test_finished_files_come_back_if_they_are_still_whole(tmp_path: Path) -> None:
    state = saved(tmp_path / "partial")
    found = ConversionState.load(tmp_path / "partial", "mine")
    assert found.files == {"a": 3}
    assert found.errors == state.errors


def test_another_conversion_or_a_damaged_state_begins_anew(tmp_path: Path) -> None:
    saved(tmp_path / "partial")
    assert ConversionState.load(tmp_path / "partial", "other") == ConversionState("other")
    assert not (tmp_path / "partial").exists()
    saved(tmp_path / "partial")
    (tmp_path / "partial" / "conversion.json").write_text("{")
    assert ConversionState.load(tmp_path / "partial", "mine") == ConversionState("mine")


def test_a_missing_file_has_no_size(tmp_path: Path) -> None:
    assert size_of(tmp_path / "none") == -1
