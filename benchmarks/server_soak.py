"""Many streams at once, a third of them left at a random moment: is anything lost, mixed up, stuck or leaked?

    python benchmarks/server_soak.py --minutes 10 --streams 32

Each request's right answer is known beforehand, from the same request alone. What counts as lost: a stream
that ends without its finish reason; mixed: text that is not the right answer, or not its beginning where the
client left; stuck: no end in time. At the end nothing may run, no KV block may be held, and the server's
resident memory (the median of its last tenth) may be at most 2 % above that of the second tenth of the run:
the first is for warming up. Exit status 1 where one of these fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from server_overhead import serving

from lean_laguna.core.provenance import describe_run

STUCK_S = 300.0
PROMPTS = ("def fib(n):", "class Queue:\n    ", "import os\n\n\n", "for i in range(", "x = {", "    return [")


@dataclass
class Tally:
    """What became of the requests."""

    finished: int = 0
    left: int = 0
    lost: int = 0
    mixed: int = 0
    stuck: int = 0
    refused: int = 0
    tokens: int = 0
    faults: list[str] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    with serving("--seed", "0", "--max-queued-seqs", str(2 * args.streams)) as (process, client):
        url = str(client.base_url)
        report = asyncio.run(soak(url, process.pid, args.minutes, args.streams, args.seed))
    text = json.dumps(describe_run(None) | report)
    if args.output:
        args.output.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0 if report["ok"] else 1


async def soak(url: str, pid: int, minutes: float, num_streams: int, seed: int) -> dict[str, Any]:
    """Run the streams and return the report."""
    bodies = list(requests(random.Random(seed)))
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=STUCK_S, limits=limits) as client:
        right = [await answer(client, body) for body in bodies]
        tally, end = Tally(), time.monotonic() + 60 * minutes
        memory: list[int] = []
        watch = asyncio.create_task(watch_memory(pid, memory, minutes))
        workers = [
            worker(client, bodies, right, tally, end, random.Random(f"{seed} {i}"))
            for i in range(num_streams)
        ]
        await asyncio.gather(*workers)
        watch.cancel()
        idle = await rest(client)
    tenth = len(memory) // 10
    before, after = memory[tenth : 2 * tenth], memory[len(memory) - tenth :]
    growth = statistics.median(after) / statistics.median(before) - 1 if tenth else 0.0
    ok = not (tally.lost or tally.mixed or tally.stuck or tally.refused or idle["blocks"] or idle["running"])
    return {
        "minutes": minutes,
        "streams": num_streams,
        **{key: value for key, value in vars(tally).items() if key != "faults"},
        "faults": tally.faults[:10],
        "held_after": idle,
        "memory_mib": [round(size / 2**20, 1) for size in memory[:: max(1, len(memory) // 10)]],
        "memory_growth": round(growth, 4),
        "memory_growth_from_start": round(memory[-1] / memory[0] - 1, 4),
        "ok": ok and growth <= 0.02,
    }


def requests(dice: random.Random) -> Any:
    """Yield requests of every kind, each with a seed, so that its answer is known."""
    for number in range(24):
        body: dict[str, Any] = {"prompt": dice.choice(PROMPTS) * dice.choice((1, 1, 20)), "seed": number}
        body |= {"temperature": dice.choice((0, 0.8, 1.2)), "max_tokens": dice.choice((5, 30, 120))}
        body |= dice.choice(({}, {"stop": ["\n\n"]}, {"logprobs": 2}, {"ignore_eos": True}, {"min_p": 0.1}))
        body |= dice.choice(({}, {"speculative": False}, {"speculative": {"num_speculative_tokens": 4}}))
        yield body


async def answer(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
    """Return the text of a request that runs alone."""
    response = await client.post("/v1/completions", json=body)
    response.raise_for_status()
    text: str = response.json()["choices"][0]["text"]
    return text


async def worker(
    client: httpx.AsyncClient,
    bodies: list[dict[str, Any]],
    right: list[str],
    tally: Tally,
    end: float,
    dice: random.Random,
) -> None:
    """Send one request after the other until the time is up."""
    while time.monotonic() < end:
        number = dice.randrange(len(bodies))
        leaves_after = dice.randrange(6) if dice.random() < 1 / 3 else None
        try:
            await asyncio.wait_for(
                one_stream(client, bodies[number], right[number], leaves_after, tally), STUCK_S
            )
        except (TimeoutError, httpx.TimeoutException):
            tally.stuck += 1
            tally.faults.append(f"stuck: {bodies[number]}")
        except httpx.HTTPError as error:
            tally.lost += 1
            tally.faults.append(f"{error!r}: {bodies[number]}")


async def one_stream(
    client: httpx.AsyncClient, body: dict[str, Any], right: str, leaves_after: int | None, tally: Tally
) -> None:
    """Read one stream to its end, or leave it after some events; 0 leaves before the first."""
    text, reasons, num_events = "", [], 0
    usage = {"include_usage": True}
    request = {**body, "stream": True, "stream_options": usage}
    async with client.stream("POST", "/v1/completions", json=request) as response:
        if response.status_code != 200:
            tally.refused += 1
            tally.faults.append(f"{response.status_code}: {body}")
            return
        async for line in response.aiter_lines():
            if leaves_after is not None and num_events >= leaves_after:
                break
            if not line.startswith("data: {"):
                continue
            num_events += 1
            chunk = json.loads(line[6:])
            for choice in chunk.get("choices", ()):
                text += choice["text"]
                reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
            if chunk.get("usage"):
                tally.tokens += chunk["usage"]["completion_tokens"]
    if leaves_after is None:
        tally.finished += 1
        is_whole = text == right
        tally.lost += len(reasons) != 1
    else:
        tally.left += 1
        is_whole = right.startswith(text)
    if not is_whole:
        tally.mixed += 1
        tally.faults.append(f"mixed: {body}: {text!r} is not {right!r}")


async def watch_memory(pid: int, memory: list[int], minutes: float) -> None:
    """Note the server's resident memory, fifty times over the run."""
    while True:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
        memory.append(int(fields[1]) * os.sysconf("SC_PAGESIZE"))
        await asyncio.sleep(60 * minutes / 50)


async def rest(client: httpx.AsyncClient) -> dict[str, float]:
    """Return what the server still holds, a moment after the last stream."""
    for _ in range(100):
        text = (await client.get("/metrics")).text
        values = {
            name: sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(metric))
            for name, metric in (
                ("running", "vllm:num_requests_running{"),
                ("waiting", "vllm:num_requests_waiting{"),
                ("blocks", "vllm:kv_cache_usage_perc{"),
            )
        }
        if not any(values.values()):
            break
        await asyncio.sleep(0.1)
    return values


if __name__ == "__main__":
    sys.exit(main())
