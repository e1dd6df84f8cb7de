"""How many CPUs this process may use: what the machine, its affinity and its container leave it."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUPS, _OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def usable_cpus() -> int:
    """Return how many CPUs this process may run on; its control group may leave it time for fewer."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *(-(-quota // period) for quota, period in _quotas())]))


def _quotas() -> list[tuple[int, int]]:
    """Return microseconds of CPU time per period, of this process's control group and those around it.

    Source: Linux, Documentation/admin-guide/cgroup-v2.rst (cpu.max) and cgroup-v1 (cpu.cfs_quota_us).
    """
    found = []
    for folder in _folders():
        try:
            if (folder / "cpu.max").exists():
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota = (folder / "cpu.cfs_quota_us").read_text().strip()
                period = (folder / "cpu.cfs_period_us").read_text().strip()
            if quota not in ("max", "-1"):
                found.append((int(quota), int(period)))
        except (OSError, ValueError):
            continue
    return found


def _folders() -> list[Path]:
    """Return the folders of this process's control group and all above it that are mounted here."""
    try:
        lines = _OWN_CGROUP.read_text().splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = _CGROUPS / controllers if controllers else _CGROUPS
        own = top / path.lstrip("/")
        folders += [folder for folder in (own, *own.parents) if folder.is_relative_to(top)]
    return folders
