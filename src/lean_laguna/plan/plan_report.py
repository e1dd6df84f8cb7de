"""A plan as people read it: one table with a column per engine, a verdict, and what to pass."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lean_laguna.plan.engine_memory import GROUP_LABELS
from lean_laguna.plan.fitting import cap_bytes
from lean_laguna.plan.units import gib

ENGINES = {"lean_laguna": "lean-laguna", "vllm": "vLLM"}
_ROWS_OF_OURS = ("full", "sliding", "draft_full", "draft_sliding")


def plan_report(found: Mapping[str, Any]) -> RenderableType:
    """Return the terminal report of ``fitting.plan``."""
    parts: list[RenderableType] = [_heading(found), _table(found), *_notes(found), Text(), *_verdict(found)]
    return Group(*parts)


def cap_line(found: Mapping[str, Any], model: str, drafter: str | None) -> str:
    """Return the command that serves a model under a cap on its memory, start-up included.

    Args:
        found: A plan.
        model: The model's name on the command line.
        drafter: The drafter's, None for none.
    """
    limit = -(-cap_bytes(found) // 2**30)
    run = f"lean-laguna serve {shlex.quote(model)} --drafter {shlex.quote(drafter or 'none')} "
    run += " ".join(found["lean_laguna"]["flags"])
    return f"systemd-run --user --scope --collect -p MemoryMax={limit}G -p MemorySwapMax=0 {run}"


def _heading(found: Mapping[str, Any]) -> Text:
    model, room = found["model"], found["room"]
    drafter = f" with drafter {model['drafter']}" if model["drafter"] else ", no drafter"
    streams = f"{found['num_streams']} stream" + ("s" if found["num_streams"] != 1 else "")
    return Text.assemble(
        (model["name"], "bold"), f"{drafter}\n{streams} of {found['context']:,} tokens in ",
        (gib(room["total_bytes"]), "bold"), f" ({room['origin']})",
    )  # fmt: skip


def _table(found: Mapping[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for name in ENGINES.values():
        table.add_column(name, justify="right", no_wrap=True)
    ours, theirs = (found[name] for name in ENGINES)
    table.add_row("weights", gib(ours["weights_bytes"]), gib(theirs["weights_bytes"]))
    if found["model"]["drafter"]:
        table.add_row("drafter", gib(ours["drafter_bytes"]), gib(theirs["drafter_bytes"]))
    mine, other = ours["kv_bytes_by_layers"], theirs["kv_bytes_by_layers"]
    for name in _ROWS_OF_OURS:
        if name in mine or other.get(name):
            table.add_row(
                f"KV cache, {GROUP_LABELS[name]}",
                gib(mine[name]) if name in mine else "–",
                gib(other[name]) if other.get(name) else "among full" if name in mine else "–",
            )
    table.add_row("workspace", f"≤ {gib(ours['workspace_bytes'])}", f"~ {gib(theirs['workspace_bytes'])}")
    table.add_section()
    table.add_row("in all", *(Text(gib(found[name]["used_bytes"]), style="bold") for name in ENGINES))
    table.add_row("left", *(_left(found[name]["left_bytes"]) for name in ENGINES))
    table.add_section()
    limit, streams = found["max_position_embeddings"], found["num_streams"]
    table.add_row(
        f"longest context for {streams} stream" + ("s" if streams != 1 else ""),
        *(_context(found[name]["longest_context"], limit) for name in ENGINES),
    )
    table.add_row(
        f"most streams of {found['context']:,}", *(_streams(found[name]["most_streams"]) for name in ENGINES)
    )
    return table


def _notes(found: Mapping[str, Any]) -> list[Text]:
    kinds = {1: "FP8", 2: "BF16", 4: "F32"}
    engine = found["engine"]
    every = f"on, a hit ends at a multiple of {engine['prefix_block_size']:,} tokens"
    caching = every if engine["enable_prefix_caching"] else "off"
    notes = [
        f"lean-laguna: exact to the byte but for the workspace; keys and values in {engine['dtype']}, pages "
        f"of {engine['kv_block_size']}, reserved per stream: nothing is preempted; prefix caching {caching}",
        f"vLLM: its own arithmetic for a hybrid cache, keys and values in "
        f"{kinds[found['vllm']['kv_element_bytes']]}; its workspace is measured when it starts, here assumed",
    ]
    return [Text(note, style="dim") for note in notes]


def _verdict(found: Mapping[str, Any]) -> list[Text]:
    ours, theirs = found["lean_laguna"], found["vllm"]
    lines = []
    if ours["fits"]:
        lines.append(Text.assemble(("fits", "bold green"), f": {gib(ours['left_bytes'])} are left"))
        lines.append(_to_copy("lean-laguna serve: " + " ".join(ours["flags"])))
    else:
        lines.append(Text.assemble(("does not fit", "bold red"), f": {gib(-ours['left_bytes'])} too much"))
        remedies = found["would_fit"]
        lines.append(Text("would fit, each alone:" if remedies else "no change known here would make it fit"))
        lines += [Text(f"  {remedy['what']}") for remedy in remedies]
    if theirs["fits"]:
        lines.append(_to_copy("vllm serve:        " + " ".join(theirs["flags"])))
    else:
        either = "" if ours["fits"] else " either"
        lines.append(Text(f"vLLM does not fit{either}: {gib(-theirs['left_bytes'])} too much"))
    return lines


def _to_copy(line: str) -> Text:
    """Return a line without breaks of ours, which a shell would take for the end of the command."""
    return Text(line, no_wrap=True, overflow="ignore")


def _left(num_bytes: int) -> Text:
    return Text(gib(num_bytes), style="green" if num_bytes >= 0 else "bold red")


def _context(length: int, limit: int) -> str:
    if not length:
        return "none"
    return f"{length:,}" + (" (its limit)" if length == limit else "")


def _streams(number: int) -> str:
    return f"{number:,}" if number else "none"
