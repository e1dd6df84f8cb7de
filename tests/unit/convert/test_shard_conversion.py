"""Files are flushed while the next is encoded; what fails then is not lost."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from lean_laguna.convert import shard_conversion
from lean_laguna.convert.shard_conversion import parts_of
from lean_laguna.convert.shard_writer import ShardWriter
from lean_laguna.core.errors import ConfigError
from lean_laguna.core.model_config import LagunaConfig
from lean_laguna.models.checkpoint import load_laguna, save_laguna
from support.quantised import convert
from support.targets import laguna_json, random_target


def sharded(folder: Path) -> Path:
    config = LagunaConfig.from_dict(laguna_json())
    save_laguna(random_target(config), config, folder, dtype=torch.bfloat16, max_shard_bytes=40_000)
    return folder


@pytest.mark.parametrize("failing", [0, 1, -1])
def test_a_disk_that_fails_while_flushing_is_an_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    source = sharded(tmp_path / "source")
    doomed = sorted(source.glob("*.safetensors"))[failing].name

    class Failing(ShardWriter):
        def finish(self) -> None:
            if self.path.name == doomed:
                raise OSError(28, "No space left on device")
            super().finish()

    monkeypatch.setattr(shard_conversion, "ShardWriter", Failing)
    with pytest.raises(ConfigError, match="No space left on device"):
        convert(source, tmp_path / "made", "experts", "nvfp4", num_workers=2)
    assert [file.name for file in tmp_path.iterdir()] == ["source"]


def test_the_next_file_is_begun_before_the_last_is_flushed_but_no_third(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = sharded(tmp_path / "source")
    begun: list[str] = []
    second_begun = threading.Event()
    most_unflushed = 0

    class Slow(ShardWriter):
        unflushed = 0

        def __init__(self, path: Path, *rest: object):
            nonlocal most_unflushed
            super().__init__(path, *rest)  # type: ignore[arg-type]
            begun.append(path.name)
            Slow.unflushed += 1
            most_unflushed = max(most_unflushed, Slow.unflushed)
            if len(begun) == 2:
                second_begun.set()

        def finish(self) -> None:
            assert second_begun.wait(20)
            super().finish()
            Slow.unflushed -= 1

    monkeypatch.setattr(shard_conversion, "ShardWriter", Slow)
    convert(source, tmp_path / "made", "experts", "nvfp4")
    assert most_unflushed == 2
    load_laguna(tmp_path / "made")


def test_parts_are_in_order_and_whole_and_keep_together_what_shares_a_divisor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shard_conversion, "_PART_BYTES", 10)
    names = ["a.norm.weight", "a.q_proj.weight", "a.o_proj.weight", "a.k_proj.weight", "b.bias", "c.weight"]
    sizes = dict(zip(names, [1, 8, 30, 8, 3, 4], strict=True))
    parts = list(parts_of(Path("x"), names, sizes))
    assert [part.names for part in parts] == [
        ("a.norm.weight", "a.q_proj.weight", "a.k_proj.weight"),
        ("a.o_proj.weight",),
        ("b.bias", "c.weight"),
    ]
    assert [part.num_bytes for part in parts] == [17, 30, 7]
