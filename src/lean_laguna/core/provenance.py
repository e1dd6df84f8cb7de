"""Where a number comes from: the code, the command, the checkpoints, the libraries and the machine.

Everything here describes; nothing measures. Values that cannot be found are absent, never guessed.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lean_laguna.core.cpus import usable_cpus
from lean_laguna.core.env import cache_dir
from lean_laguna.core.errors import LeanLagunaError
from lean_laguna.core.files import atomic_write_text, sha256_file

LIBRARIES = ("torch", "numpy", "safetensors", "tokenizers", "jinja2", "triton", "vllm", "transformers")
CHECKPOINT_PATTERNS = ("config.json", "*.safetensors")
COMMAND_TIMEOUT_S = 10.0


def describe_run(argv: Iterable[str] | None = None) -> dict[str, Any]:
    """Return the command line, the code's commit, library versions and the machine, ready for JSON.

    Args:
        argv: The command line; None takes this process's, with the program shortened to its name.
    """
    given = list(argv) if argv is not None else [Path(sys.argv[0]).name, *sys.argv[1:]]
    return {
        "argv": given,
        "git_commit": git_commit(),
        "versions": library_versions(),
        "machine": machine(),
    }


def git_commit() -> str | None:
    """Return the commit of the package's source tree, with ``+dirty`` where tracked files differ.

    None where the package does not run from a git checkout.
    """
    folder = Path(__file__).resolve().parent
    git = ["git", "--no-optional-locks", "-C", str(folder)]  # someone may be committing meanwhile
    commit = _output_of([*git, "rev-parse", "HEAD"])
    if commit is None or _output_of([*git, "ls-files", "--error-unmatch", __file__]) is None:
        return None  # an installed copy may lie inside some other project's checkout
    changes = _output_of([*git, "status", "--porcelain", "--untracked-files=no"])
    return f"{commit}+dirty" if changes else commit


def library_versions() -> dict[str, str]:
    """Return versions of Python, of this package and of the libraries that are installed."""
    versions = {"python": platform.python_version()}
    for name in ("lean-laguna", *LIBRARIES):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def machine() -> dict[str, Any]:
    """Return processor, usable cores, memory, operating system and NVIDIA GPUs with their driver."""
    facts: dict[str, Any] = {
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "num_cpus": usable_cpus(),
        "memory_bytes": _memory_bytes(),
    }
    if gpus := _nvidia_gpus():
        facts["gpus"] = gpus
    return facts


def checkpoint_hash(folder: str | os.PathLike[str]) -> str:
    """Return one SHA-256 over config and weights of a checkpoint: file names and the hash of each file.

    Weights are hashed once; later calls take the hash from the cache folder while size and modification time
    stay the same.
    """
    files = sorted({path for pattern in CHECKPOINT_PATTERNS for path in Path(folder).glob(pattern)})
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{_cached_sha256(file)}\n".encode())
    return digest.hexdigest()


def _cached_sha256(file: Path) -> str:
    real = file.resolve()
    stat = real.stat()
    key = f"{real}\0{stat.st_size}\0{stat.st_mtime_ns}"
    entry = cache_dir() / "hashes" / hashlib.sha256(key.encode()).hexdigest()
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        stored = json.loads(entry.read_text(encoding="utf-8"))
        if stored["key"] == key:
            return str(stored["sha256"])
    digest = sha256_file(real)
    with contextlib.suppress(OSError, LeanLagunaError):  # a read-only home only costs time
        entry.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(entry, json.dumps({"key": key, "sha256": digest}))
    return digest


def _output_of(command: list[str]) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_model() -> str | None:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or None


def _memory_bytes() -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def _nvidia_gpus() -> list[dict[str, str]]:
    query = "--query-gpu=name,memory.total,driver_version"
    output = _output_of(["nvidia-smi", query, "--format=csv,noheader"]) or ""
    rows = [[cell.strip() for cell in line.split(",")] for line in output.splitlines()]
    return [{"name": r[0], "memory": r[1], "driver": r[2]} for r in rows if len(r) == 3]
