"""What the HTTP server costs per streamed token over the engine alone: one stream, many short pairs of runs.

Both sides of a pair are the same engine, on the same thread of the same process, one right after the other:
once stepped with nobody listening, once serving a client in a process of its own. Which goes first
alternates, so that a machine whose speed drifts moves both alike; each pair gives one ratio, and the ratios'
median is the figure, with the interval that holds it in 95 of 100 cases. Time is processor time of the whole
process: what the server does on its second core counts in full, as if it had none. Wall time stands beside
it, and, from within the served runs alone, what all threads but the engine's took as a share of the
engine's: the figure to read on a machine that others use, where a process with two threads is given more of
the cores than one with one.

    python benchmarks/server_overhead.py --output results/server_overhead.json
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import httpx
import torch

from lean_laguna.core.provenance import describe_run
from lean_laguna.core.types import SamplingParams
from lean_laguna.engine.llm import LLM
from lean_laguna.server.listener import bind
from lean_laguna.server.run import SWITCH_INTERVAL_S, make_server
from lean_laguna.server.settings import ServerConfig

PROMPT = "def quicksort(items):\n"
# Reads one stream per line of its input, and says when the first event and the end have come.
READER = """
import http.client, sys
for line in sys.stdin:
    host, body = line.rstrip().split(" ", 1)
    connection = http.client.HTTPConnection(host)
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    response = connection.getresponse()
    for event in response:
        if event.startswith(b"data:"):
            break
    print("first", flush=True)
    count = 1 + sum(event.startswith(b"data: {") for event in response)
    print(count, flush=True)
"""


class Pairs:
    """A server in this process, and a client in another.

    Attributes:
        llm: The engine that both sides run.
        num_events: Per served run, the events that carried its tokens: fewer than steps where the server had
            no time to send one by one.
        shares: Per served run, the processor time of all threads but the engine's as a share of the engine's.
    """

    def __init__(self, max_tokens: int):
        self.max_tokens, self.num_events, self.shares = max_tokens, list[int](), list[float]()
        self.llm = LLM("nano", speculative_config={"model": "nano-dflash"}, seed=0)
        settled, listener = threading.Event(), bind("127.0.0.1", 0)
        self._host = f"127.0.0.1:{listener.getsockname()[1]}"
        self._server = make_server(ServerConfig(), lambda: self.llm, lambda _: settled.set())
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]})
        self._thread.start()
        settled.wait()
        (engine,) = (thread for thread in threading.enumerate() if thread.name == "engine")
        assert engine.ident is not None
        self._clock = time.pthread_getcpuclockid(engine.ident)
        words = [sys.executable, "-c", READER]
        self._client = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def close(self) -> None:
        """End the client and the server."""
        self._client.communicate("")
        self._server.should_exit = True
        self._thread.join()

    def alone(self, length: int) -> tuple[float, float]:
        """Return processor and wall seconds per token after the first, with nobody listening."""
        service = self._server.app.service
        assert service is not None
        work = service.engine.call(lambda llm: self._step_to_the_end(llm, length))
        return asyncio.run_coroutine_threadsafe(work, service.engine._loop).result()

    def _step_to_the_end(self, llm: LLM, length: int) -> tuple[float, float]:
        params = SamplingParams(temperature=0, max_tokens=self.max_tokens, ignore_eos=True)
        engine = llm.engine
        state = engine.add_request(llm.tokenizer.encode(PROMPT), params, num_speculative_tokens=length)
        while state.first_token_s is None:
            engine.step()
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        while engine.has_unfinished:
            engine.step()
        return self._per_token(cpu_s, wall_s)

    def served(self, length: int) -> tuple[float, float]:
        """Return this process's seconds per token after the first while the client reads them."""
        how: Any = False if length == 0 else {"num_speculative_tokens": length}
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": self.max_tokens, "ignore_eos": True}
        to, told = _pipes(self._client)
        to.write(f"{self._host} {json.dumps(body | {'speculative': how, 'stream': True})}\n")
        to.flush()
        assert told.readline() == "first\n"
        cpu_s, wall_s, engine_s = time.process_time(), time.perf_counter(), time.clock_gettime(self._clock)
        self.num_events.append(int(told.readline()))
        spent = self._per_token(cpu_s, wall_s)
        engine_s = time.clock_gettime(self._clock) - engine_s
        self.shares.append(spent[0] * (self.max_tokens - 1) / engine_s - 1)
        return spent

    def _per_token(self, cpu_s: float, wall_s: float) -> tuple[float, float]:
        count = self.max_tokens - 1
        return (time.process_time() - cpu_s) / count, (time.perf_counter() - wall_s) / count


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--draft-lengths", type=int, nargs="+", default=[0, 7])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    report: dict[str, Any] = describe_run(None) | {"pairs": args.pairs, "max_tokens": args.max_tokens}
    pairs = Pairs(args.max_tokens)
    try:
        for length in args.draft_lengths:
            report[f"{length} drafts"] = compare(pairs, length, args.pairs)
    finally:
        pairs.close()
    text = json.dumps(report)
    if args.output:
        args.output.write_text(text + "\n", encoding="utf-8")
    print(text)


def compare(pairs: Pairs, length: int, count: int) -> dict[str, Any]:
    """Return what serving adds, as a share of the engine's own time, and both sides in ms per token."""
    runs: list[tuple[tuple[float, float], tuple[float, float]]] = []
    pairs.num_events.clear()
    pairs.shares.clear()
    for number in range(count + 2):  # the first two are for warming up
        if number % 2:
            alone, served = pairs.alone(length), pairs.served(length)
        else:
            served, alone = pairs.served(length), pairs.alone(length)
        if number >= 2:
            runs.append((alone, served))
    events = statistics.mean(pairs.num_events[2:])
    figures: dict[str, Any] = {"tokens_per_event": round(pairs.max_tokens / events, 3)}
    for i, clock in enumerate(("cpu", "wall")):
        ratios = [served[i] / alone[i] - 1 for alone, served in runs]
        low, high = median_interval(ratios)
        quartiles = statistics.quantiles(ratios, n=4)
        figures[clock] = {
            "overhead": statistics.median(ratios),
            "interval_95": [low, high],
            "quartiles": [quartiles[0], quartiles[2]],
            "alone_ms": 1000 * statistics.median(alone[i] for alone, _ in runs),
            "served_ms": 1000 * statistics.median(served[i] for _, served in runs),
        }
        print(
            f"{length} drafts, {clock}: {figures[clock]['alone_ms']:.3f} ms a token alone, overhead "
            f"{100 * figures[clock]['overhead']:.1f} % (95 %: {100 * low:.1f} to {100 * high:.1f}; quartiles "
            f"{100 * quartiles[0]:.1f} and {100 * quartiles[2]:.1f}) over {count} pairs",
            file=sys.stderr,
        )
    figures["other_threads_share"] = statistics.median(pairs.shares[2:])
    print(
        f"{length} drafts: other threads {100 * figures['other_threads_share']:.1f} % of the engine's",
        file=sys.stderr,
    )
    return figures


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the ordered values between which the median lies in 95 of 100 cases."""
    ordered, count = sorted(values), len(values)
    reach = round(0.98 * count**0.5)
    return ordered[max(0, count // 2 - reach)], ordered[min(count - 1, (count - 1) // 2 + reach)]


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert process.stdin is not None
    assert process.stdout is not None
    return process.stdin, process.stdout


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
