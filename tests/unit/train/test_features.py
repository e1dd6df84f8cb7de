import contextlib
import dataclasses
import fcntl
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from lean_laguna.core import files
from lean_laguna.core.errors import ConfigError
from lean_laguna.train import features
from lean_laguna.train.documents import Document, pack
from lean_laguna.train.features import open_cache
from lean_laguna.train.processes import Processes
from lean_laguna.train.target import build_target
from support.training import target_recipe

LENGTH, TAPS = 12, (0, 2)


@pytest.fixture(scope="module")
def target():
    return build_target(target_recipe(init_std=0.3), torch.device("cpu"), "test").requires_grad_(False)


@pytest.fixture
def packed(monkeypatch):
    monkeypatch.setattr(features, "SHARD_BYTES", 2 * 2 * LENGTH * 3 * 16)  # two rows of three vectors of 16
    documents = [
        Document(str(i), torch.arange(40 + i, 40 + i + LENGTH, dtype=torch.int32), torch.ones(LENGTH).bool())
        for i in range(9)
    ]
    return pack(documents, LENGTH)


@dataclasses.dataclass(frozen=True)
class Threads(Processes):
    """Threads in the place of processes."""

    barrier: threading.Barrier = dataclasses.field(default_factory=lambda: threading.Barrier(1))

    def wait(self):
        self.barrier.wait(60)


def test_several_processes_share_the_shards_and_leave_those_of_one(target, packed, tmp_path, monkeypatch):
    one = open_cache(tmp_path / "one", packed, target, TAPS, "x")
    assert len(one.shards) == 5
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / ".features-00000.bf16.x.tmp").write_bytes(b"of a killed run")
    lines, barrier = [], threading.Barrier(2)
    with ThreadPoolExecutor(2) as threads:
        tasks = [
            threads.submit(
                open_cache,
                tmp_path / "two",
                packed,
                target,
                TAPS,
                "x",
                lines.append,
                Threads(rank, 2, barrier),
            )
            for rank in range(2)
        ]
        found = [task.result() for task in tasks]
    written = sorted(line for line in lines if line.endswith("written"))
    assert written == [f"features: shard {i} of 5 written" for i in range(1, 6)]
    for cache in found:
        assert all(torch.equal(*pair) for pair in zip(cache.shards, one.shards, strict=True))
    assert sorted(file.name for file in (tmp_path / "two").iterdir()) == sorted(
        file.name for file in (tmp_path / "one").iterdir()
    )


@contextlib.contextmanager
def held(folder):
    """As another process holds it."""
    handle = os.open(folder, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    yield
    os.close(handle)


def test_a_cache_may_lie_in_the_working_folder(target, packed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    open_cache(Path(), packed, target, TAPS, "x")
    assert (tmp_path / "features-00000.bf16").exists()


def test_a_cache_that_another_run_is_writing_is_left_alone_and_a_whole_one_read_by_several(
    target, packed, tmp_path
):
    folder = tmp_path / "features"
    folder.mkdir()
    begun = folder / ".features-00000.bf16.x.tmp"
    begun.write_bytes(b"of a run at work")
    with held(folder), pytest.raises(ConfigError, match="features: another process is writing there"):
        open_cache(folder, packed, target, TAPS, "x")
    assert [file.name for file in folder.iterdir()] == [begun.name]
    whole = open_cache(folder, packed, target, TAPS, "x")
    assert not begun.exists()
    os.close(files._HELD_FOLDERS.pop(os.path.realpath(folder)))  # as if this process had ended
    with held(folder):
        again = open_cache(folder, packed, target, TAPS, "x")
    assert all(torch.equal(*pair) for pair in zip(whole.shards, again.shards, strict=True))
