"""The peak of this process, not of the one that started it."""

from __future__ import annotations

import subprocess
import sys

from lean_laguna.core.memory import peak_rss_bytes

MB = 1 << 20
CHILD = "from lean_laguna.core.memory import peak_rss_bytes; print(peak_rss_bytes())"


def test_what_was_used_once_counts_on() -> None:
    before = peak_rss_bytes()
    block = bytearray(b"x" * (64 * MB))
    held = peak_rss_bytes()
    del block
    assert peak_rss_bytes() >= held > before / 2
    assert held > 64 * MB


def test_a_child_does_not_inherit_its_parents_peak() -> None:
    block = bytearray(b"x" * (200 * MB))
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True)
    assert 1 * MB < int(done.stdout) < 100 * MB
    assert len(block) == 200 * MB
