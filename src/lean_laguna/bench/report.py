"""Result files as people read them: tables for the terminal and one static HTML page.

Everything is drawn from the content of a result file, so that an old file can be shown again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

import jinja2
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lean_laguna.bench.ab import BASELINE, SPECULATIVE
from lean_laguna.bench.charts import Point, bars_svg, line_svg, text_bar
from lean_laguna.bench.parity import CONTROL

BAR_WIDTH = 24
GIB = 2**30
TOLD = {BASELINE: "without drafter", SPECULATIVE: "with drafter", CONTROL: "without drafter, again"}
"""What files call the sides, and what people read."""
COLOURS = {"identical": "green", "near-tie": "yellow", "mismatch": "bold red"}


def heading(result: Mapping[str, Any]) -> Text:
    """Return one or two lines that say what was run on what."""
    engine = _drafting_engine(result)
    target, drafter = engine.get("model", {}), engine.get("drafter")
    prompts, sampling = result["prompts"], result["sampling"]
    names = f"target {target.get('name', '?')}" + _millions(target)
    if drafter:
        names += f" · drafter {drafter['name']}{_millions(drafter)}"
    if result["kind"] == "ab" and "num_speculative_tokens" in engine:
        names += f" · draft length {engine['num_speculative_tokens']}"
    temperature = sampling["temperature"]
    mode = "greedy" if temperature == 0 else f"temperature {temperature:g}, seed {result['seed']}"
    repeats = "" if result["kind"] == "parity" else f" · {_count(result['repeats'], 'repeat')}, interleaved"
    what = f"{_count(prompts['num_prompts'], 'prompt')} ({prompts['name']})"
    what += f" × up to {sampling['max_tokens']} tokens · {mode}{repeats}"
    machine = result["machine"]
    gpus = ", ".join(gpu["name"] for gpu in machine.get("gpus", []))
    where = gpus if engine.get("device") == "cuda" and gpus else machine.get("cpu") or "unknown processor"
    threads = f", {_count(engine['num_threads'], 'thread')}" if "num_threads" in engine else ""
    where += f"{threads} · torch {result['versions'].get('torch', '?')} · {engine.get('dtype', '?')}"
    if "base_url" in engine:  # how that server computes is its own affair
        servers = {i["base_url"]: i for i in result["engines"].values() if "base_url" in i}
        said = (
            f"{url} ({i['engine']} {i.get('engine_version', '')}".rstrip() + ")" for url, i in servers.items()
        )
        where = "over HTTP: " + ", ".join(said)
    lines = [names, what, where]
    lines += [f"note, {url}: {limit}" for url, limit in _limits(result)]
    if result.get("synthetic"):
        lines.insert(0, "SYNTHETIC: for timing only; what came out is not a model's output")
    return Text("\n".join(lines))


def _limits(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what the servers cannot do, each once."""
    found = [(i["base_url"], said) for i in result["engines"].values() for said in i.get("limits", ())]
    return list(dict.fromkeys(found))


def ab_report(result: Mapping[str, Any], *, per_prompt: bool = True) -> RenderableType:
    """Return the terminal report of an A/B."""
    parts: list[RenderableType] = [_ab_table(result)]
    rates = result["sides"][SPECULATIVE].get("spec_decode_per_position_acceptance_rates")
    if rates:
        parts += [Text(), _acceptance_table(rates, is_mixed=_is_mixed(result))]
    if per_prompt:
        parts += [Text(), _prompt_table(result["per_prompt"])]
    if reason := result["engines"][SPECULATIVE].get("draft_length_reason"):
        parts += [Text(), Text(str(reason))]
    parts += [Text(), _ab_parity_line(result), *_warning_lines(result)]
    return Group(*parts)


def sweep_report(result: Mapping[str, Any]) -> RenderableType:
    """Return the terminal report of a sweep: a table with its chart, and the best length."""
    rows = result["rows"]
    fastest = max(_rate(row) for row in rows) or 1.0
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("draft length", justify="right")
    table.add_column("tok/s", justify="right")
    table.add_column("", width=BAR_WIDTH)
    for title in ("speed-up", "accepted length", "parity"):
        table.add_column(title, justify="right")
    best = result["best_num_speculative_tokens"]
    for row in rows:
        count = row["num_speculative_tokens"]
        wrong = row["parity"]["mismatch"]
        accepted = row.get("spec_decode_acceptance_length")
        table.add_row(
            str(count) if count else "off",
            f"{_rate(row):.1f}",
            Text(text_bar(_rate(row) / fastest, BAR_WIDTH), style="green" if count == best else "blue"),
            f"{row['speedup']['median']:.2f}×" if "speedup" in row else "1.00×",
            f"{accepted:.2f}" if accepted else "–",
            Text("identical" if not wrong else f"{wrong} differ", style="green" if not wrong else "bold red"),
        )
    label = f"{best} draft tokens" if best else "off: no draft length is faster than none"
    parts: list[RenderableType] = [table, Text.assemble("best: ", (label, "bold green"))]
    parts += [*_difference_lines(result["parity"]["differences"]), *_warning_lines(result)]
    return Group(*parts)


def parity_report(result: Mapping[str, Any]) -> RenderableType:
    """Return the terminal report of a parity run: a verdict per prompt and side."""
    verdicts: Mapping[str, Sequence[Mapping[str, Any]]] = result["verdicts"]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("prompt")
    table.add_column("tokens", justify="right")
    for side in verdicts:
        table.add_column(side)
    for row in zip(*verdicts.values(), strict=True):
        cells = [Text(str(v["kind"]), style=COLOURS[v["kind"]]) for v in row]
        table.add_row(row[0]["prompt_id"], str(row[0]["num_tokens"]), *cells)
    counts = result["parity"]
    compared = sum(len(side) for side in verdicts.values())
    line = Text.assemble(
        (f"{counts['num_mismatches']} mismatches", "bold red" if counts["num_mismatches"] else "bold green"),
        f", {counts['num_near_ties']} near-ties in {compared} comparisons over {counts['num_tokens']} tokens",
    )
    return Group(table, line, *_difference_lines(counts["differences"]))


def to_html(result: Mapping[str, Any]) -> str:
    """Return one static page: headline, charts, all numbers, and where they come from."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    source = (
        resources.files("lean_laguna.bench").joinpath("templates", "report.html.jinja").read_text("utf-8")
    )
    return environment.from_string(source).render(
        result=result,
        told=TOLD,
        heading=heading(result).plain.split("\n"),
        charts=charts(result),
        provenance={
            k: result[k] for k in ("date", "argv", "git_commit", "versions", "machine", "engines", "seed")
        },
    )


def charts(result: Mapping[str, Any]) -> list[str]:
    """Return the SVG charts of a result."""
    if result["kind"] == "sweep":
        return [sweep_svg(result)]
    if result["kind"] != "ab":
        return []
    sides = result["sides"]
    rates = [(name, sides[name]["decode_tok_per_s"]) for name in sides if "decode_tok_per_s" in sides[name]]
    points = [Point(TOLD.get(name, name), r["median"], r["min"], r["max"]) for name, r in rates]
    found = [bars_svg("Decode speed", points, y_label="tokens per second")]
    accepted = sides[SPECULATIVE].get("spec_decode_per_position_acceptance_rates")
    if accepted:
        points = [Point(str(i + 1), rate) for i, rate in enumerate(accepted)]
        found.append(bars_svg("Acceptance by draft position", points, y_label="share of drafts", top=1.0))
    return found


def sweep_svg(result: Mapping[str, Any]) -> str:
    """Return the chart of a sweep."""
    points, baseline = [], None
    for row in result["rows"]:
        rate = row.get("decode_tok_per_s")
        if not rate:
            continue
        if row["num_speculative_tokens"] == 0:
            baseline = rate["median"]
        else:
            good = row["parity"]["mismatch"] == 0
            points.append(
                Point(str(row["num_speculative_tokens"]), rate["median"], rate["min"], rate["max"], good)
            )
    return line_svg(
        "Decode speed by draft length",
        points,
        y_label="tokens per second",
        x_label="draft tokens per step",
        baseline=baseline,
    )


def _ab_table(result: Mapping[str, Any]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column(TOLD[BASELINE], justify="right", no_wrap=True)
    table.add_column(TOLD[SPECULATIVE], justify="right", no_wrap=True)
    table.add_column("")
    a, b = result["sides"][BASELINE], result["sides"][SPECULATIVE]
    for cells in _decode_rows(a, b, result.get("speedup")):
        table.add_row(*cells)
    for label, key in (
        ("time to first token, ms", "median_ttft_ms"),
        ("time per token, ms", "median_tpot_ms"),
        ("tok/s, prompt included", "output_throughput"),
    ):
        table.add_row(label, *(_number(m.get(key)) for m in (a, b)), "")
    for cells in _acceptance_rows(b, is_mixed=_is_mixed(result)):
        table.add_row(*cells)
    shares = [m.get("distinct_8gram_share") for m in (a, b)]
    table.add_row("distinct 8-grams", *(f"{s:.0%}" if s is not None else "–" for s in shares), "in the text")
    memory = [sum(e.get("memory", {}).values()) for e in result["engines"].values()]
    if any(memory):
        peak = result["engines"][SPECULATIVE].get("gpu_peak_bytes", result["process_peak_rss_bytes"])
        table.add_row("memory", *(_size(m) for m in memory), f"peak, all: {_size(peak)}")
    return table


def _decode_rows(
    a: Mapping[str, Any], b: Mapping[str, Any], speedup: Mapping[str, Any] | None
) -> list[tuple[str | Text, ...]]:
    rates = [m.get("decode_tok_per_s") for m in (a, b)]
    factor = Text("–")
    if speedup:
        style = "bold green" if speedup["median"] >= 1 else "bold red"
        factor = Text(f"{speedup['median']:.2f}×", style=style)
    medians = (_number(r["median"]) if r else "–" for r in rates)
    rows: list[tuple[str | Text, ...]] = [
        (Text("decode, tok/s", style="bold"), *(Text(m, style="bold") for m in medians), factor)
    ]
    if speedup and len(speedup["values"]) > 1:
        spread = [f"{r['min']:.1f}–{r['max']:.1f}" if r else "–" for r in rates]
        rows.append(("  range over repeats", *spread, f"{speedup['min']:.2f}–{speedup['max']:.2f}"))
    return rows


def _is_mixed(result: Mapping[str, Any]) -> bool:
    """Whether the drafts had several lengths, and some steps maybe none."""
    return bool(result["engines"][SPECULATIVE].get("num_speculative_tokens") == "auto")


def _acceptance_rows(metrics: Mapping[str, Any], *, is_mixed: bool) -> list[tuple[str, ...]]:
    length, rate = (metrics.get(f"spec_decode_acceptance_{name}") for name in ("length", "rate"))
    if length is None or rate is None:
        return []
    limit = len(metrics["spec_decode_per_position_acceptance_rates"]) + 1
    what = "a step with drafts" if is_mixed else f"tokens a step, of {limit}"
    return [
        ("mean acceptance length", "–", f"{length:.2f}", what),
        ("draft tokens accepted", "–", f"{rate:.0f} %", ""),
    ]


def _acceptance_table(rates: Sequence[float], *, is_mixed: bool) -> Group:
    title = "accepted by draft position" + (", drafts of several lengths together" if is_mixed else "")
    # Of a length that was only tried, the last positions say nothing.
    shown = max((i for i, rate in enumerate(rates, start=1) if rate), default=0) if is_mixed else len(rates)
    table = Table(box=None, pad_edge=False, show_header=False)
    for position, rate in enumerate(rates[:shown], start=1):
        table.add_row(f"{position:>3}", Text(text_bar(rate, BAR_WIDTH), style="green"), f"{rate:.2f}")
    return Group(Text(title), table)


def _prompt_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("prompt")
    table.add_column("", style="dim")
    for title in ("tokens", "without", "with", "speed-up", "accepted"):
        table.add_column(title, justify="right")
    table.add_column("parity")
    for row in rows:
        a, b = (row[side].get("decode_tok_per_s", {}).get("median") for side in (BASELINE, SPECULATIVE))
        table.add_row(
            row["id"],
            row["difficulty"],
            str(row[BASELINE]["completion_tokens"]),
            _number(a),
            _number(b),
            f"{b / a:.2f}×" if a and b else "–",
            _number(row[SPECULATIVE].get("spec_decode_acceptance_length"), 2),
            Text(row["parity"], style=COLOURS[row["parity"]]),
        )
    return table


def _ab_parity_line(result: Mapping[str, Any]) -> Text:
    parity = result["parity"]
    compared = sum(sum(parity[side].values()) for side in ("control", "speculative"))
    wrong = parity["num_mismatches"]
    by_text = any("compared as text" in said for _, said in _limits(result))
    line = Text.assemble(
        (f"{wrong} mismatches", "bold red" if wrong else "bold green"),
        f": {compared} outputs compared with the first run without drafter, "
        f"{'text for text' if by_text else 'token for token'}",
    )
    for extra in _difference_lines(parity["differences"]):
        line.append("\n").append_text(extra)
    return line


def _difference_lines(differences: Sequence[Mapping[str, Any]]) -> list[Text]:
    lines = []
    for one in differences[:10]:
        margin = f", margin {one['margin']:.3g}" if "margin" in one else ""
        text = f"  {one['prompt_id']}, {one['side']}: {one['kind']}, {one.get('reason', '')}{margin}"
        lines.append(Text(text, style=COLOURS[one["kind"]]))
    if len(differences) > 10:
        lines.append(Text(f"  and {len(differences) - 10} more"))
    return lines


def _warning_lines(result: Mapping[str, Any]) -> list[Text]:
    return [Text(f"note: {warning}", style="yellow") for warning in result.get("warnings", ())]


def _drafting_engine(result: Mapping[str, Any]) -> Mapping[str, Any]:
    engines = list(result["engines"].values())
    return next((e for e in engines if "drafter" in e), engines[0] if engines else {})


def _rate(row: Mapping[str, Any]) -> float:
    return float(row["decode_tok_per_s"]["median"]) if "decode_tok_per_s" in row else 0.0


def _number(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _size(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.0f} MiB"


def _millions(model: Mapping[str, Any]) -> str:
    count = model.get("num_parameters")
    return f" ({count / 1e6:.1f} M parameters)" if count else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
