"""A profile says where a step's time goes, marks random weights, and holds bytes against the floor."""

import io

from rich.console import Console

from lean_laguna.bench.profile import profile, profile_report
from lean_laguna.engine.llm import LLM
from support.engines import make_engine


def shown(content):
    console = Console(width=110, file=io.StringIO())
    console.print(profile_report(content))
    return console.file.getvalue()


def test_on_a_cpu_operations_are_sorted_by_kind():
    content = profile(LLM.from_engine(make_engine()), context_len=8, num_steps=2)
    names = {part["name"] for part in content["parts"]}
    assert "matrix products" in names
    assert content["step_s"] > 0
    assert content["read_bytes_per_s"] is None
    assert "on a CPU" in shown(content)
    assert "SYNTHETIC" not in shown(content)


def test_bytes_are_held_against_the_floor():
    parts = [
        {"name": "experts down", "launches": 39.0, "step_s": 0.001, "num_bytes": 2_000_000_000},
        {"name": "other", "launches": 3.0, "step_s": 0.0001, "num_bytes": 0},
    ]
    content = {"model": "laguna-xs", "synthetic": True, "device": "cuda", "dtype": "bfloat16"}
    content |= {"context_len": 2048, "step_s": 0.002, "read_bytes_per_s": 4e12, "parts": parts}
    text = shown(content)
    assert "SYNTHETIC" in text
    assert "2000" in text  # GB/s
    assert "50%" in text  # 500 us of floor in 1000
    assert "25% of it" in text  # of the step
