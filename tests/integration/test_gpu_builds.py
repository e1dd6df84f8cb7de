"""Kernels build and fit on cards that are not here: none is needed for either."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lean_laguna.kernels.cuda.compiler import has_nvrtc

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_builds.py"


def built(folder: Path, *options: str) -> dict[str, Any]:
    """Run the script; return its result by architecture."""
    done = subprocess.run(
        [sys.executable, SCRIPT, "--quick", "--out", folder / "builds.json", *options],
        env=os.environ | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found: dict[str, Any] = json.loads((folder / "builds.json").read_text())["architectures"]
    return found


def test_small_kernels_build_for_an_old_card_and_a_new_one(tmp_path: Path) -> None:
    found = built(
        tmp_path, "--workers", "1", "--architectures", "80,121", "--only", "publish,norm.rms,project_add.cu"
    )
    for architecture, row in found.items():
        assert row["failed"] == row["left_out"] == 0, row
        assert row["kernels"]["publish.publish_kernel"]["built"] == 1, architecture
        assert row["kernels"]["norm.rms_norm_kernel"]["built"] > 0, architecture
    assert found["sm_80"]["engines"][0]["runs_on"] == "Triton"
    assert "project_add.cu" not in found["sm_80"]["kernels"]


@pytest.mark.slow
def test_all_kernels_of_an_engine_build_and_fit_everywhere(tmp_path: Path) -> None:
    found = built(tmp_path)
    assert len(found) == 10
    for row in found.values():
        assert row["failed"] == row["left_out"] == 0, row["failures"]
        assert row["built"] > 50
        assert row["most_shared_bytes"] <= row["shared_bytes_a_program"]
        assert has_nvrtc() or not any(name.endswith(".cu") for name in row["kernels"])
