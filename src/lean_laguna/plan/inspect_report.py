"""An inspection as people read it: four small tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lean_laguna.plan.traffic import TAIL_ACCEPTANCE
from lean_laguna.plan.units import count, gb, gib, per_s

BAR_WIDTH = 16
LABELS = {"kv": "keys and values", "dense": "dense MLP", "head": "output head", "embedding": "embedding rows"}
_KNOWN_FROM = {
    "headers": "from the headers of its files",
    "config": "from its config.json alone",
    "shape": "a published shape, no files",
}


def inspection_report(found: Mapping[str, Any]) -> RenderableType:
    """Return the terminal report of ``inspection.inspect``."""
    parts: list[RenderableType] = [_heading(found), _weights(found), _token(found)]
    parts += [*_token_notes(found), _rows(found), *_row_notes(found)]
    if "files" in found:
        parts += [Text(), *_files(found["files"])]
    return Group(*parts)


def _heading(found: Mapping[str, Any]) -> Text:
    model = found["model"]
    lines = Text.assemble(
        (model["name"], "bold"), f"  ({_KNOWN_FROM[model['known_from']]})\n",
        f"{count(model['num_weights'])} weights in {gib(model['stored_bytes'])}, ",
        f"{count(model['num_weights_per_token'])} read per token · {model['num_layers']} layers · ",
        f"context {model['max_position_embeddings']:,}",
    )  # fmt: skip
    if model["has_fp8_kv"]:
        lines.append(" · brings scales for FP8 keys and values")
    return lines


def _weights(found: Mapping[str, Any]) -> Table:
    table = _table("what is stored", "as", "weights", "size", "share")
    total = found["model"]["stored_bytes"]
    last = None
    for group in found["weights"]:
        kind = group["module_class"]
        table.add_row(
            LABELS.get(kind, kind) if kind != last else "",
            group["number_format"],
            count(group["num_weights"]),
            gib(group["stored_bytes"]),
            _percent(group["stored_bytes"] / total),
        )
        last = kind
    return table


def _token(found: Mapping[str, Any]) -> Table:
    token = found["token"]
    table = _table("one token reads", "as", "bytes", "share", "", "weights*")
    largest = max(part["share"] for part in token["parts"])
    for part in token["parts"]:
        if not part["bytes"]:
            continue
        bar = "█" * max(1, round(part["share"] / largest * BAR_WIDTH)) if part["share"] > 0.005 else ""
        table.add_row(
            LABELS.get(part["part"], part["part"]),
            ", ".join(part["formats"]) if part["part"] != "kv" else _kv_format(found),
            gb(part["bytes"]),
            _percent(part["share"]),
            Text(bar, style="blue"),
            _percent(part["narrow_share"]) if "narrow_share" in part else Text("–", style="dim"),
        )
    table.add_section()
    table.add_row(
        Text("all", style="bold"), "", Text(gb(token["bytes"]), style="bold"), "", "",
        gb(token["narrow"]["bytes"]),
    )  # fmt: skip
    table.add_row(
        Text("at most", style="bold"), f"at {per_s(found['bandwidth']['bytes_per_s'])}",
        Text(f"{token['ceiling_tok_per_s']:,.0f} tok/s", style="bold green"), "", "",
        f"{token['narrow']['ceiling_tok_per_s']:,.0f} tok/s",
    )  # fmt: skip
    return table


def _token_notes(found: Mapping[str, Any]) -> list[Text]:
    bandwidth = found["bandwidth"]
    said = f"bandwidth: {bandwidth['origin']}"
    if bandwidth["reached"]:
        speed = bandwidth["reached"] / found["token"]["bytes"]
        said += f", reached by programs: {per_s(bandwidth['reached'])} ({speed:,.0f} tok/s)"
    return [
        Text(f"{said}; context {found['context']:,}, no drafter", style="dim"),
        Text(
            "* attention, routed and shared experts only, as the DGX Spark recipe counts",
            style="dim",
        ),
    ]


def _rows(found: Mapping[str, Any]) -> Table:
    has_drafter = "drafter" in found
    titles = ["rows", "experts\na layer", "bytes", "ms", "× one\nrow"]
    if has_drafter:
        titles += ["ms with\ndrafter", "tokens\na step", "needed", "tok/s\nat most"]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for title in titles:
        table.add_column(title, justify="right", no_wrap=True)
    best = max((row.get("ceiling_tok_per_s", 0.0) for row in found["rows"]), default=0.0)
    for row in found["rows"]:
        cells: list[Any] = [
            str(row["num_rows"]),
            f"{row['num_distinct_experts']:.1f}",
            gb(row["bytes"]),
            _ms(row["pass_ms"]),
            f"{row['relative']:.2f}",
        ]
        if has_drafter:
            is_best = row["ceiling_tok_per_s"] == best
            drafts = row["num_rows"] > 1
            cells += [
                _ms(row["step_ms"]),
                f"{row['mean_acceptance_length']:.2f}",
                f"{row['break_even_length']:.2f}" if drafts else "–",
                Text(f"{row['ceiling_tok_per_s']:,.0f}", style="bold green" if is_best else ""),
            ]
        table.add_row(*cells)
    return table


def _row_notes(found: Mapping[str, Any]) -> list[Text]:
    routing = f"rows share {found['overlap']:.0%} of their experts" if found["overlap"] else "uniform routing"
    notes = [f"ms: at least, a pass of so many rows; experts: expected distinct ones, {routing}"]
    if "drafter" in found:
        notes.append("needed: tokens a step below which drafting is slower than no drafting")
        drafter = found["drafter"]
        rates = " ".join(f"{rate:.2f}".lstrip("0") for rate in drafter["rates"])
        notes.append(
            f"drafter {drafter['name']}: {gb(drafter['read_bytes'])} a pass, the target's head included; "
            f"acceptance {rates}, then × {TAIL_ACCEPTANCE} a position"
        )
    return [Text(note, style="dim") for note in notes]


def _files(files: Mapping[str, Any]) -> list[Text]:
    shards = f"{files['num_shards']} file" + ("s" if files["num_shards"] != 1 else "")
    what = f"{shards}, {files['num_tensors']:,} tensors, {gib(files['bytes'])}"
    lines = []
    if files["problems"]:
        lines.append(Text.assemble(("not whole: ", "bold red"), what))
        lines += [Text(f"  {problem}") for problem in files["problems"]]
    else:
        lines.append(Text.assemble(("whole: ", "bold green"), what, "; index, headers and config agree"))
    for name, (digest, is_published) in files.get("hashes", {}).items():
        said = {True: ("as published", "green"), False: ("NOT as published", "bold red"), None: ("", "")}
        lines.append(Text.assemble(f"  {digest}  {name}  ", said[is_published]))
    return lines


def _ms(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.4f}"


def _kv_format(found: Mapping[str, Any]) -> str:
    return {1: "FP8", 2: "BF16", 4: "F32"}[found["kv_element_bytes"]]


def _table(*titles: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for i, title in enumerate(titles):
        table.add_column(title, justify="left" if i < 2 or not title else "right")
    return table


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.0005 else "<0.1%"
