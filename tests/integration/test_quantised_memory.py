"""A quantised checkpoint is decoded in pieces: loading takes little more than the decoded model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.quantised import convert, write_target

# 76 million weights, 302 MB in float32.
SHAPE = {
    "hidden_size": 512,
    "num_experts": 64,
    "moe_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "intermediate_size": 512,
}
LOAD = """
import sys
import torch
from lean_laguna.core.memory import peak_rss_bytes
from lean_laguna.models.checkpoint import load_laguna
load_laguna(sys.argv[1])  # a small one, for what the libraries load themselves
before = peak_rss_bytes()
model = load_laguna(sys.argv[2])
print(sum(parameter.nbytes for parameter in model.parameters()), peak_rss_bytes() - before)
"""
# The codes are mapped and count as resident while they are read: 9/16 of a byte a weight, and pieces beside.
SPARE = 1.25


@pytest.mark.slow
def test_loading_takes_little_more_than_the_decoded_model(tmp_path: Path) -> None:
    convert(write_target(tmp_path / "source", **SHAPE), tmp_path / "made", "experts", "nvfp4")
    convert(write_target(tmp_path / "small source"), tmp_path / "small", "experts", "nvfp4")
    words = [sys.executable, "-c", LOAD, str(tmp_path / "small"), str(tmp_path / "made")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    size, taken = (int(word) for word in done.stdout.split())
    assert size > 300e6
    assert taken < SPARE * size, f"{taken / 1e6:.0f} MB for {size / 1e6:.0f} MB"
