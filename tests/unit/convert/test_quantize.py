"""Whole conversions: bytes that stay, what survives a kill, and what is left after an error."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lean_laguna.convert import quantize as module
from lean_laguna.convert import shard_conversion
from lean_laguna.convert.modules import class_of
from lean_laguna.convert.quantize import quantize
from lean_laguna.convert.quantize_plan import group_rules, make_plan, parse_scheme
from lean_laguna.convert.shard_writer import ShardWriter
from lean_laguna.convert.source import open_source
from lean_laguna.core.errors import CheckpointError, ConfigError
from lean_laguna.core.model_config import LagunaConfig
from lean_laguna.models.checkpoint import load_laguna, save_laguna
from lean_laguna.models.drafter_checkpoint import load_drafter
from support.checkpoints import write_tiny_drafter
from support.engines import tiny_config
from support.quantised import change_tensors, convert, write_target
from support.targets import laguna_json, random_target


def all_bytes(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def sharded(folder: Path) -> Path:
    config = LagunaConfig.from_dict(laguna_json())
    save_laguna(random_target(config), config, folder, dtype=torch.bfloat16, max_shard_bytes=40_000)
    assert len(list(folder.glob("*.safetensors"))) > 3
    return folder


def test_untouched_tensors_are_the_same_bytes_and_other_files_are_copied(tmp_path: Path) -> None:
    source = write_target(tmp_path / "source")
    (source / "tokenizer.json").write_text("{}")
    (source / "notes").mkdir()
    result = convert(source, tmp_path / "made", "experts", "nvfp4")
    before = load_file(str(source / "model.safetensors"))
    after = load_file(str(tmp_path / "made" / "model.safetensors"))
    kept = [name for name in before if class_of(name.removesuffix(".weight")) not in ("experts", "shared")]
    assert len(before) - len(kept) == result.num_modules == 81
    for name in kept:
        assert after[name].dtype == before[name].dtype
        assert torch.equal(after[name].view(torch.uint8), before[name].view(torch.uint8))
    assert sorted(all_bytes(tmp_path / "made")) == ["config.json", "model.safetensors", "tokenizer.json"]
    config, given = (json.loads((f / "config.json").read_text()) for f in (tmp_path / "made", source))
    assert {key: value for key, value in config.items() if key != "quantization_config"} == given


def test_many_files_stay_many_with_an_index(tmp_path: Path) -> None:
    source = sharded(tmp_path / "source")
    convert(source, tmp_path / "made", "experts", "fp8-channel")
    index = json.loads((tmp_path / "made" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {file.name for file in source.glob("*.safetensors")}
    whole = write_target(tmp_path / "whole")
    convert(whole, tmp_path / "one", "experts", "fp8-channel")
    found, expected = load_laguna(tmp_path / "made"), load_laguna(tmp_path / "one")
    assert all(torch.equal(p, expected.get_parameter(name)) for name, p in found.named_parameters())


def test_the_number_of_workers_changes_no_byte(tmp_path: Path) -> None:
    source = sharded(tmp_path / "source")
    convert(source, tmp_path / "one", "experts+attention", "nvfp4", num_workers=1)
    convert(source, tmp_path / "many", "experts+attention", "nvfp4", num_workers=3)
    assert all_bytes(tmp_path / "one") == all_bytes(tmp_path / "many")


class Killed(BaseException):
    """Stands for Ctrl-C at a chosen moment."""


def interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> Path:
    source = sharded(tmp_path / "source")
    finished = []

    class Dying(ShardWriter):
        def finish(self) -> None:
            if len(finished) == after:
                raise Killed
            super().finish()
            finished.append(self.path)

    with monkeypatch.context() as patch:
        patch.setattr(shard_conversion, "ShardWriter", Dying)
        with pytest.raises(Killed):
            convert(source, tmp_path / "made", "experts", "nvfp4", is_checked=True)
    assert not (tmp_path / "made").exists()
    return source


def test_after_a_kill_the_same_command_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = interrupted(tmp_path, monkeypatch, after=2)
    result = convert(source, tmp_path / "made", "experts", "nvfp4", is_checked=True)
    assert result.num_resumed_files == 2
    whole = convert(source, tmp_path / "whole", "experts", "nvfp4", is_checked=True)
    assert all_bytes(tmp_path / "made") == all_bytes(tmp_path / "whole")
    assert dict(result.errors) == dict(whole.errors)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["made", "source", "whole"]


KILLED_OUTRIGHT = """
import os, signal, sys
from lean_laguna.cli.main import main
from lean_laguna.convert import shard_conversion

class Dying(shard_conversion.ShardWriter):
    finished = 0

    def finish(self):
        super().finish()
        Dying.finished += 1
        if Dying.finished == 3:
            os.kill(os.getpid(), signal.SIGKILL)

shard_conversion.ShardWriter = Dying
main(sys.argv[1:])
"""


def test_after_a_process_is_killed_outright_the_next_goes_on(tmp_path: Path) -> None:
    source = sharded(tmp_path / "source")
    words = [
        "convert",
        "quantize",
        str(source),
        str(tmp_path / "made"),
        "--scheme",
        "nvfp4",
    ]
    done = subprocess.run([sys.executable, "-c", KILLED_OUTRIGHT, *words], capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / "made").exists()
    # The third file was whole but not yet noted.
    assert convert(source, tmp_path / "made", "experts", "nvfp4").num_resumed_files == 2
    convert(source, tmp_path / "whole", "experts", "nvfp4")
    assert all_bytes(tmp_path / "made") == all_bytes(tmp_path / "whole")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["made", "source", "whole"]


def test_a_kill_before_the_config_is_written_loses_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = sharded(tmp_path / "source")
    write = module.atomic_write_json

    def dying(path: Path, value: object) -> None:
        if path.name == "config.json":
            raise Killed
        write(path, value)

    with monkeypatch.context() as patch:
        patch.setattr(module, "atomic_write_json", dying)
        with pytest.raises(Killed):
            convert(source, tmp_path / "made", "experts", "nvfp4")
    resumed = convert(source, tmp_path / "made", "experts", "nvfp4")
    assert resumed.num_resumed_files == len(list(source.glob("*.safetensors")))
    convert(source, tmp_path / "whole", "experts", "nvfp4")
    assert all_bytes(tmp_path / "made") == all_bytes(tmp_path / "whole")


def test_another_conversion_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = interrupted(tmp_path, monkeypatch, after=2)
    assert convert(source, tmp_path / "made", "experts", "fp8-channel").num_resumed_files == 0
    load_laguna(tmp_path / "made")


def test_an_error_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "source")
    change_tensors(
        folder, model__layers__2__mlp__experts__1__down_proj__weight=torch.full((32, 16), torch.nan)
    )
    with pytest.raises(CheckpointError, match="not finite"):
        convert(folder, tmp_path / "made", "experts", "nvfp4")
    assert [file.name for file in tmp_path.iterdir()] == ["source"]


def test_a_taken_place_and_a_full_disk_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_target(tmp_path / "source")
    with pytest.raises(ConfigError, match="exists already; expected a folder that does not exist yet"):
        convert(source, source, "experts", "nvfp4")
    with pytest.raises(ConfigError, match=r"the folder .* does not exist"):
        convert(source, tmp_path / "a" / "b", "experts", "nvfp4")
    monkeypatch.setattr(module, "_SPARE_BYTES", 1 << 60)
    with pytest.raises(ConfigError, match=r"it takes [0-9,]+ MB, and [0-9,]+ MB are free"):
        convert(source, tmp_path / "made", "experts", "nvfp4")
    assert [file.name for file in tmp_path.iterdir()] == ["source"]


def test_an_empty_folder_may_be_the_place(tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    convert(write_target(tmp_path / "source"), tmp_path / "made", "experts", "nvfp4")
    load_laguna(tmp_path / "made")


def test_progress_counts_bytes_up_to_all(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    lock = threading.Lock()

    def note(done: int, total: int, what: str) -> None:
        with lock:
            seen.append((done, total))
        assert what.endswith(".safetensors")

    result = convert(sharded(tmp_path / "source"), tmp_path / "made", "experts", "nvfp4", progress=note)
    assert seen[-1] == (result.source_bytes, result.source_bytes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_quantised_checkpoint_takes_further_modules(tmp_path: Path) -> None:
    source = write_target(tmp_path / "source")
    convert(source, tmp_path / "first", "experts", "nvfp4")
    convert(tmp_path / "first", tmp_path / "second", "attention", "int8")
    first = load_file(str(tmp_path / "first" / "model.safetensors"))
    second = load_file(str(tmp_path / "second" / "model.safetensors"))
    kept = [name for name in first if "self_attn" not in name]
    assert all(torch.equal(first[name].view(torch.uint8), second[name].view(torch.uint8)) for name in kept)
    assert len(open_source(tmp_path / "second").quantised) == 81 + 16
    load_laguna(tmp_path / "second")


def test_a_drafter_is_quantised_and_loads(tmp_path: Path) -> None:
    (tmp_path / "drafter").mkdir()
    source = open_source(write_tiny_drafter(tmp_path / "drafter"))
    schemes = make_plan(source, group_rules("all", parse_scheme("fp8-channel")))
    quantize(source, tmp_path / "made", schemes)
    before = load_drafter(tmp_path / "drafter", tiny_config())
    after = load_drafter(tmp_path / "made", tiny_config())
    for name, parameter in before.named_parameters():
        found = after.get_parameter(name)
        changed = "proj" in name or name == "fc.weight"
        assert torch.equal(found, parameter) != changed, name
        assert torch.allclose(found, parameter, rtol=0.07, atol=1e-3), name
