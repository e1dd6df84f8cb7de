"""Checkpoints as sources: what is refused before anything is done."""

from __future__ import annotations

from pathlib import Path

import pytest

from lean_laguna.convert.source import open_source
from lean_laguna.core.errors import CheckpointError
from support.checkpoints import write_tiny_drafter
from support.quantised import convert, write_target


def test_linears_are_listed_with_their_shapes(tmp_path: Path) -> None:
    source = open_source(write_target(tmp_path / "source"))
    assert source.shapes["model.layers.1.mlp.experts.7.down_proj"] == (32, 16)
    assert "model.layers.1.mlp.gate" in source.other_modules()
    assert not source.quantised
    assert not source.is_drafter


def test_quantised_linears_are_told_apart(tmp_path: Path) -> None:
    convert(write_target(tmp_path / "source"), tmp_path / "made", "attention", "int8")
    source = open_source(tmp_path / "made")
    assert {name.rpartition(".")[2] for name in source.quantised} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert source.shapes == open_source(tmp_path / "source").shapes


def test_a_drafter_is_known_as_one(tmp_path: Path) -> None:
    (tmp_path / "drafter").mkdir()
    source = open_source(write_tiny_drafter(tmp_path / "drafter"))
    assert source.is_drafter
    assert "fc" in source.shapes


def test_half_a_download_is_refused(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "source")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "model-00002.safetensors.incomplete").touch()
    with pytest.raises(CheckpointError, match=r"half downloaded: 1 unfinished files such as model-00002"):
        open_source(folder)


def test_a_missing_or_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not found; expected a checkpoint folder"):
        open_source(tmp_path / "nowhere")
    file = write_target(tmp_path / "source") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated"):
        open_source(tmp_path / "source")
