"""The scripts behind results/ fit the code: each can be imported, and those with a small run have it."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
NAMES = sorted(path.stem for path in FOLDER.glob("*.py"))
TRIED = {
    "gpu_beside_vllm": ["--tiny", "--plan", "ours"],
    "gpu_dspark_serving": ["--tiny", "--budget", "900"],
    "gpu_invariance": ["--tiny", "--budget", "900"],
    "gpu_layers": ["--tiny", "--budget", "900"],
    "gpu_prefill": ["--tiny", "--budget", "900"],
    "gpu_step": ["--tiny", "--budget", "900"],
    "gpu_train_step": ["--small", "--only", "dspark/sdpa", "--repeats", "1"],
}
"""Without a GPU, under Triton's interpreter."""


def test_each_script_can_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    before = set(sys.modules)
    try:
        for name in NAMES:
            assert importlib.import_module(name).__doc__, name
    finally:
        for name in set(sys.modules) - before:
            if name in NAMES:
                del sys.modules[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", TRIED)
def test_a_script_runs_in_small(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, FOLDER / f"{name}.py", *TRIED[name], "--out", tmp_path],
        env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert list(tmp_path.glob("*.json"))
    for path in tmp_path.glob("*.json"):
        assert not json.loads(path.read_text()).get("errors"), done.stdout[-3000:]
