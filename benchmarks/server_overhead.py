"""What the HTTP server costs per streamed token over the engine alone: one stream, runs taken in turn.

Time is processor time of the process that computes: the other work of a shared machine does not count, and
what the server does on its second core counts in full, as if it had none. Wall time stands beside it, and,
from within the served runs alone, what all threads but the engine's take as a share of the engine's: on a
machine whose speed varies from run to run this is the figure to trust.

    python benchmarks/server_overhead.py --rounds 7 --max-tokens 256
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import torch

from lean_laguna.core.types import SamplingParams
from lean_laguna.engine.llm import LLM

PROMPT = "def quicksort(items):\n"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--draft-lengths", type=int, nargs="+", default=[0, 7])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    llm = LLM("nano", speculative_config={"model": "nano-dflash"})
    with serving() as (process, client):
        report = {
            f"{length} drafts": compare(llm, process.pid, client, length, args.rounds, args.max_tokens)
            for length in args.draft_lengths
        }
    text = json.dumps({"rounds": args.rounds, "max_tokens": args.max_tokens, **report})
    if args.output:
        args.output.write_text(text + "\n", encoding="utf-8")
    print(text)


def compare(
    llm: LLM, pid: int, client: httpx.Client, length: int, rounds: int, max_tokens: int
) -> dict[str, Any]:
    """Return both sides in ms per token, best and median of the rounds, and the overhead."""
    alone, served, shares = [], [], []
    for number in range(rounds + 1):  # the first is for warming up
        one, (*other, share) = run_alone(llm, length, max_tokens), run_served(client, pid, length, max_tokens)
        if number:
            alone.append(one)
            served.append(other)
            shares.append(share)
    figures: dict[str, Any] = {}
    for i, clock in enumerate(("cpu", "wall")):
        a, b = ([1000 * run[i] for run in runs] for runs in (alone, served))
        figures[f"alone_{clock}_ms"] = {"best": min(a), "median": statistics.median(a)}
        figures[f"served_{clock}_ms"] = {"best": min(b), "median": statistics.median(b)}
        overhead = {"best": min(b) / min(a) - 1, "median": statistics.median(b) / statistics.median(a) - 1}
        figures[f"overhead_{clock}"] = overhead
        print(
            f"{length} drafts, {clock}, best of {rounds}: alone {min(a):.3f} ms a token, served "
            f"{min(b):.3f} ms, overhead {100 * overhead['best']:.1f} % (of the medians: "
            f"{100 * overhead['median']:.1f} %)",
            file=sys.stderr,
        )
    figures["other_threads_share"] = {"best": min(shares), "median": statistics.median(shares)}
    print(
        f"{length} drafts: other threads {100 * statistics.median(shares):.1f} % of the engine's",
        file=sys.stderr,
    )
    return figures


def run_alone(llm: LLM, length: int, max_tokens: int) -> tuple[float, float]:
    """Return processor and wall seconds per token after the first."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    engine = llm.engine
    state = engine.add_request(llm.tokenizer.encode(PROMPT), params, num_speculative_tokens=length)
    while state.first_token_s is None:
        engine.step()
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    while engine.has_unfinished:
        engine.step()
    count = max_tokens - 1
    return (time.process_time() - cpu_s) / count, (time.perf_counter() - wall_s) / count


def run_served(client: httpx.Client, pid: int, length: int, max_tokens: int) -> tuple[float, float, float]:
    """Return the server's processor seconds and the client's wall seconds per token after the first.

    The third figure is what all threads but the busiest took, as a share of the busiest's.
    """
    how: Any = False if length == 0 else {"num_speculative_tokens": length}
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": max_tokens, "ignore_eos": True}
    body |= {"speculative": how, "stream": True}
    before = wall_s = None
    with client.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if before is None and line.startswith("data:"):
                before, wall_s = cpu_seconds(pid), time.perf_counter()
    assert before is not None
    assert wall_s is not None
    count, after = max_tokens - 1, cpu_seconds(pid)
    taken = [after[thread] - before.get(thread, 0.0) for thread in after]
    return sum(taken) / count, (time.perf_counter() - wall_s) / count, sum(taken) / max(taken) - 1


def cpu_seconds(pid: int) -> dict[str, float]:
    """Return the processor time of each thread of a process."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        found[task.name] = (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    return found


@contextlib.contextmanager
def serving(*options: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """Run a server of its own process until the block ends."""
    command = [sys.executable, "-m", "lean_laguna.cli.main", "serve", "--port", "0", "--threads", "1"]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if " ready on " in line:
                url = line.split(" ready on ")[1].split(": ")[0]
                with httpx.Client(base_url=url, timeout=600) as client:
                    yield process, client
                break
        else:
            raise SystemExit("the server did not start")
    finally:
        process.terminate()
        process.communicate(timeout=60)


if __name__ == "__main__":
    main()
