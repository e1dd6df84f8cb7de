"""CPUs that a process may use, by affinity and by its control group's share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lean_laguna.core import cpus
from lean_laguna.core.cpus import usable_cpus


def with_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, files: dict[str, str]) -> int:
    for name, text in files.items():
        file = tmp_path / "fs" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "own").write_text(own)
    monkeypatch.setattr(cpus, "_CGROUPS", tmp_path / "fs")
    monkeypatch.setattr(cpus, "_OWN_CGROUP", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    return usable_cpus()


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/\n", {}, 8),
        ("0::/\n", {"cpu.max": "max 100000\n"}, 8),
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 3),
        ("0::/\n", {"cpu.max": "10000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "9900000 100000\n"}, 8),
        ("0::/a/b\n", {"a/cpu.max": "200000 100000\n", "a/b/cpu.max": "max 100000\n"}, 2),
        ("0::/a\n", {"cpu.max": "rubbish\n"}, 8),
        (
            "4:cpu,cpuacct:/x\n3:memory:/y\n",
            {"cpu,cpuacct/x/cpu.cfs_quota_us": "400000", "cpu,cpuacct/x/cpu.cfs_period_us": "100000"},
            4,
        ),
        ("4:cpu:/x\n", {"cpu/x/cpu.cfs_quota_us": "-1", "cpu/x/cpu.cfs_period_us": "100000"}, 8),
    ],
)
def test_the_smallest_share_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, files: dict[str, str], expected: int
) -> None:
    assert with_groups(tmp_path, monkeypatch, own, files) == expected


def test_here_it_is_no_more_than_the_affinity() -> None:
    assert 1 <= usable_cpus() <= len(os.sched_getaffinity(0))
