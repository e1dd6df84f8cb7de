"""Worker processes: the same bytes, their errors, and what is left when one, or this one, is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from lean_laguna.convert import shard_conversion, worker_pool
from lean_laguna.convert.part_converter import Conversion
from lean_laguna.convert.quantize import default_workers
from lean_laguna.convert.quantize_plan import group_rules, make_plan, parse_scheme
from lean_laguna.convert.source import open_source
from lean_laguna.convert.worker_pool import WorkerPool
from lean_laguna.core.errors import CheckpointError, ConfigError, WorkerError
from lean_laguna.core.model_config import LagunaConfig
from lean_laguna.models.checkpoint import load_laguna, save_laguna
from support.quantised import change_tensors, convert, write_target
from support.targets import laguna_json, random_target


def sharded(folder: Path) -> Path:
    config = LagunaConfig.from_dict(laguna_json())
    save_laguna(random_target(config), config, folder, dtype=torch.bfloat16, max_shard_bytes=40_000)
    return folder


def all_bytes(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Leave all work to processes, a few tensors at a time; returns those that are started."""
    started: list[Any] = []

    class Noted(worker_pool._Process):
        def __init__(self) -> None:
            super().__init__()
            started.append(self)

    monkeypatch.setattr(worker_pool, "_Process", Noted)
    monkeypatch.setattr(worker_pool, "_OWN_THREADS", 0)
    monkeypatch.setattr(shard_conversion, "_PART_BYTES", 2000)
    return started


def test_processes_make_the_same_bytes_and_errors_and_say_what_they_took(
    tmp_path: Path, processes: list[Any]
) -> None:
    source = sharded(tmp_path / "source")
    seen: list[int] = []
    made = convert(
        source,
        tmp_path / "made",
        "experts+attention",
        "nvfp4",
        num_workers=2,
        is_checked=True,
        progress=lambda done, total, what: seen.append(done),
    )
    assert len(processes) == 2
    assert any(process.peak_rss_bytes > 50e6 for process in processes)
    assert made.workers_peak_rss_bytes == sum(process.peak_rss_bytes for process in processes)
    assert made.workers_cpu_s > 0.1
    assert seen == sorted(seen)
    assert seen[-1] == made.source_bytes
    assert all(process._process.returncode is not None for process in processes)
    worker_pool._OWN_THREADS = 1
    alone = convert(source, tmp_path / "alone", "experts+attention", "nvfp4", is_checked=True)
    assert len(processes) == 2
    assert all_bytes(tmp_path / "made") == all_bytes(tmp_path / "alone")
    assert dict(made.errors) == dict(alone.errors)
    assert (alone.workers_cpu_s, alone.workers_peak_rss_bytes) == (0.0, 0)


def test_a_killed_worker_is_told_and_the_same_command_goes_on(tmp_path: Path, processes: list[Any]) -> None:
    source = sharded(tmp_path / "source")

    def kill(done: int, total: int, what: str) -> None:
        if done > total // 2 and len(processes) == 1:
            os.kill(processes[0]._process.pid, signal.SIGKILL)

    with pytest.raises(
        WorkerError,
        match=r"a worker process was killed \(SIGKILL\); the finished files are kept: run the same",
    ):
        convert(source, tmp_path / "made", "experts", "nvfp4", progress=kill)
    assert sorted(file.name for file in tmp_path.iterdir()) == [".made.partial", "source"]
    assert not list((tmp_path / ".made.partial").glob(".*"))
    worker_pool._OWN_THREADS = 1
    assert convert(source, tmp_path / "made", "experts", "nvfp4").num_resumed_files > 0
    convert(source, tmp_path / "whole", "experts", "nvfp4")
    assert all_bytes(tmp_path / "made") == all_bytes(tmp_path / "whole")


def test_a_workers_error_is_the_same_as_ones_own_and_leaves_nothing(
    tmp_path: Path, processes: list[Any]
) -> None:
    folder = write_target(tmp_path / "source")
    change_tensors(
        folder, model__layers__2__mlp__experts__1__down_proj__weight=torch.full((32, 16), torch.nan)
    )
    with pytest.raises(CheckpointError, match=r"experts\.1\.down_proj\.weight': .* not finite"):
        convert(folder, tmp_path / "made", "experts", "nvfp4")
    assert [file.name for file in tmp_path.iterdir()] == ["source"]
    assert processes[0]._process.returncode is not None


def test_a_process_that_cannot_be_started_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(
        ConfigError, match=r"cannot start a worker process: Resource .*; expected fewer --work"
    ):
        convert(write_target(tmp_path / "source"), tmp_path / "made", "experts", "nvfp4", num_workers=2)
    assert [file.name for file in tmp_path.iterdir()] == ["source"]


BY_HAND = """
import os, sys
from lean_laguna.cli.main import main
from lean_laguna.convert import shard_conversion, worker_pool
from lean_laguna.convert.shard_writer import ShardWriter

worker_pool._OWN_THREADS = 0

class Noted(worker_pool._Process):
    def start(self, message):
        super().start(message)
        print(self._process.pid, flush=True)

class Halting(ShardWriter):
    finished = 0

    def finish(self):
        if Halting.finished == 2:
            print("now", flush=True)
            sys.stdin.read(1)
        super().finish()
        Halting.finished += 1

worker_pool._Process, shard_conversion.ShardWriter = Noted, Halting
sys.exit(main(sys.argv[1:]))
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_the_command_and_the_next_goes_on(tmp_path: Path, how: signal.Signals) -> None:
    source = sharded(tmp_path / "source")
    words = [
        "convert",
        "quantize",
        str(source),
        str(tmp_path / "made"),
        "--scheme",
        "nvfp4",
        "--workers",
        "1",
    ]
    with subprocess.Popen(
        [sys.executable, "-c", BY_HAND, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as command:
        assert command.stdout is not None
        worker = int(command.stdout.readline())
        assert command.stdout.readline() == "now\n"
        assert is_running(worker)
        command.send_signal(how)
        _, said = command.communicate("x", timeout=60)
    if how == signal.SIGINT:
        assert command.returncode == 130
        assert said.strip() == "lean-laguna: interrupted"
    else:
        assert command.returncode == -how
        assert said == ""
    deadline = time.monotonic() + 20
    while is_running(worker):
        assert time.monotonic() < deadline, "the worker is still there"
        time.sleep(0.05)
    assert not (tmp_path / "made").exists()
    assert len(json.loads((tmp_path / ".made.partial" / "conversion.json").read_text())["files"]) >= 2
    assert convert(source, tmp_path / "made", "experts", "nvfp4").num_resumed_files >= 2
    load_laguna(tmp_path / "made")


def test_small_checkpoints_get_one_worker_and_large_ones_one_per_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lean_laguna.convert import quantize

    source = open_source(write_target(tmp_path / "source"))
    monkeypatch.setattr(quantize, "usable_cpus", lambda: 6)
    monkeypatch.setattr(quantize, "free_memory_bytes", lambda device: 64 << 30)
    assert default_workers(source) == 1
    monkeypatch.setattr(quantize, "_WORKER_BYTES", 1000)
    assert default_workers(source) == 6
    monkeypatch.setattr(quantize, "usable_cpus", lambda: 96)
    assert default_workers(source) == 16
    monkeypatch.setattr(quantize, "free_memory_bytes", lambda device: 2 << 30)
    assert default_workers(source) == 4
    monkeypatch.setattr(quantize, "free_memory_bytes", lambda device: 1 << 20)
    assert default_workers(source) == 1


def test_threads_alone_need_no_process(tmp_path: Path, processes: list[Any]) -> None:
    source = open_source(write_target(tmp_path / "source"))
    schemes = make_plan(source, group_rules("experts", parse_scheme("int8")))
    pool = WorkerPool(Conversion(source, schemes, tmp_path), num_threads=3)
    assert [pool.submit(lambda worker: None).result() for _ in range(5)] == [None] * 5
    pool.close()
    assert not processes
