"""Where a decode step's time goes: on a GPU by kernel class beside the bytes read, on a CPU by operation."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lean_laguna.core.provenance import describe_run
from lean_laguna.core.types import SamplingParams
from lean_laguna.engine.llm import LLM

NUM_STEPS, NUM_WARM_STEPS = 32, 8
_CPU_CLASSES = {
    "matrix products": ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul"),
    "attention": ("softmax", "scaled_dot_product"),
    "gather and copy": ("index", "copy", "cat", "gather", "embedding", "clone", "stack"),
    "elementwise": ("mul", "add", "exp", "rsqrt", "norm", "sum", "div", "sigmoid", "neg", "max"),
}


@dataclass(frozen=True)
class Part:
    """One class of a step.

    Attributes:
        name: Of the class.
        launches: Kernels or operations a step.
        step_s: Seconds a step.
        num_bytes: Bytes it must read a step; 0 where not counted.
    """

    name: str
    launches: float
    step_s: float
    num_bytes: int = 0


def profile(llm: LLM, context_len: int, num_steps: int = NUM_STEPS) -> dict[str, Any]:
    """Decode one request and return what a step's time went to, ready for JSON.

    Args:
        llm: Idle; a prompt of random tokens runs through it, without drafts.
        context_len: Tokens before the steps that are measured.
        num_steps: Steps timed, and again as many looked into.
    """
    engine = llm.engine
    vocab_size = engine.target.config.vocab_size
    prompt = torch.randint(0, vocab_size, (context_len,), generator=torch.Generator().manual_seed(0)).tolist()
    max_tokens = 2 * (num_steps + NUM_WARM_STEPS) + 8
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    state = engine.add_request(prompt, params, num_speculative_tokens=0)
    said = state.sequences[0].completion.token_ids
    while len(said) < NUM_WARM_STEPS:
        engine.step()
    device = next(engine.target.parameters()).device
    step_s = _time_steps(llm, device, num_steps)
    activity = torch.profiler.ProfilerActivity
    kinds = [activity.CUDA] if device.type == "cuda" else [activity.CPU]
    with torch.profiler.profile(activities=kinds, acc_events=True) as profiler:
        for _ in range(num_steps):
            engine.step()
        _sync(device)
    engine.abort(state.request_id)
    bandwidth, parts = _parts(llm, profiler, device, context_len, num_steps)
    return {
        "schema_version": 1,
        "kind": "profile",
        **describe_run(None),
        "model": engine.config.shape or engine.config.model,
        "synthetic": engine.config.is_synthetic,
        "device": device.type,
        "dtype": str(next(engine.target.parameters()).dtype).removeprefix("torch."),
        "context_len": context_len,
        "step_s": step_s,
        "read_bytes_per_s": bandwidth,
        "parts": [vars(part) for part in parts],
    }


def _sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _time_steps(llm: LLM, device: torch.device, num_steps: int) -> float:
    _sync(device)
    start = time.perf_counter()
    for _ in range(num_steps):
        llm.engine.step()
    return (time.perf_counter() - start) / num_steps


def _parts(
    llm: LLM, profiler: torch.profiler.profile, device: torch.device, context_len: int, num_steps: int
) -> tuple[float | None, list[Part]]:
    """Sort what the profiler saw into classes, the longest first."""
    if device.type != "cuda":
        return None, _cpu_parts(profiler, num_steps)
    from lean_laguna.engine.gpu_profile import class_of, read_bandwidth, step_bytes

    programs = getattr(llm.engine, "programs", None)
    num_bytes = {} if programs is None else step_bytes(programs, context_len)
    found: dict[str, tuple[float, float]] = {}
    for event in profiler.key_averages():
        total_s, count = event.device_time_total / 1e6, event.count
        if total_s:
            before = found.get(class_of(event.key), (0.0, 0.0))
            found[class_of(event.key)] = (before[0] + total_s, before[1] + count)
    parts = [
        Part(name, count / num_steps, total_s / num_steps, num_bytes.get(name, 0))
        for name, (total_s, count) in found.items()
    ]
    return read_bandwidth(device), sorted(parts, key=lambda part: -part.step_s)


def _cpu_parts(profiler: torch.profiler.profile, num_steps: int) -> list[Part]:
    found: dict[str, tuple[float, float]] = {}
    for event in profiler.key_averages():
        name = event.key.removeprefix("aten::")
        kind = next(
            (kind for kind, words in _CPU_CLASSES.items() if any(name.startswith(w) for w in words)), "other"
        )
        before = found.get(kind, (0.0, 0.0))
        found[kind] = (before[0] + event.self_cpu_time_total / 1e6, before[1] + event.count)
    parts = [Part(name, count / num_steps, s / num_steps) for name, (s, count) in found.items()]
    return sorted(parts, key=lambda part: -part.step_s)


def profile_report(content: Mapping[str, Any]) -> RenderableType:
    """Return a profile as a table for the terminal."""
    rate = content["read_bytes_per_s"]
    mark = "SYNTHETIC, no model's output · " if content["synthetic"] else ""
    title = f"{mark}{content['model']} · {content['device']} · {content['dtype']} · one request at "
    title += f"{content['context_len']} tokens, no drafts"
    table = Table(box=box.SIMPLE_HEAD)
    names = ["class", "a step", "us a step", "share"]
    names += ["MB", "GB/s", "floor us", "of floor"] if rate else []
    for i, name in enumerate(names):
        table.add_column(name, justify="left" if i == 0 else "right")
    step_s, busy_s = content["step_s"], sum(part["step_s"] for part in content["parts"])
    rows = [*content["parts"], {"name": "all", "launches": 0, "step_s": busy_s, "num_bytes": 0}]
    total = sum(part["num_bytes"] for part in content["parts"])
    for part in rows:
        num_bytes = total if part["name"] == "all" else part["num_bytes"]
        launches = f"{part['launches']:.0f}" if part["launches"] else ""
        cells = [part["name"], launches, f"{1e6 * part['step_s']:.1f}", f"{part['step_s'] / step_s:.0%}"]
        if rate and num_bytes:
            floor_s = num_bytes / rate
            speed = num_bytes / max(1e-12, part["step_s"])
            cells += [f"{num_bytes / 1e6:.1f}", f"{speed / 1e9:.0f}"]
            cells += [f"{1e6 * floor_s:.1f}", f"{floor_s / max(1e-12, part['step_s']):.0%}"]
        table.add_row(*cells)
    lines = [f"a step takes {1e3 * step_s:.3f} ms, {1 / step_s:.1f} tok/s"]
    if rate:
        lines.append(
            f"a kernel that only reads reaches {rate / 1e9:.0f} GB/s here: {total / 1e6:.0f} MB a token "
            f"cannot take less than {1e3 * total / rate:.3f} ms ({rate / total:.0f} tok/s); this is "
            f"{total / rate / step_s:.0%} of it"
        )
    else:
        lines.append("on a CPU, operations by kind; bytes are not counted")
    return Group(Text(title), table, *(Text(line) for line in lines))
