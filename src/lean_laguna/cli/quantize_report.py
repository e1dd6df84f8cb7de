"""What ``lean-laguna convert quantize`` says it has done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lean_laguna.cli.terminal import Terminal
    from lean_laguna.convert.quantize import QuantizeResult
    from lean_laguna.convert.source import Source
    from lean_laguna.quant.scheme import WeightScheme


def describe(result: QuantizeResult, schemes: dict[str, WeightScheme], source: Source) -> dict[str, Any]:
    """Return the part of the report that says what was quantised and what it took."""
    from lean_laguna.convert.modules import class_of
    from lean_laguna.convert.weight_encoder import WeightError
    from lean_laguna.core.memory import peak_rss_bytes

    rows: dict[tuple[str, str], dict[str, Any]] = {}
    errors: dict[tuple[str, str], WeightError] = {}
    worst: dict[tuple[str, str], tuple[float, str]] = {}
    for module, scheme in schemes.items():
        key = (str(class_of(module)), scheme.name)
        row = rows.setdefault(key, {"class": key[0], "scheme": key[1], "num_modules": 0, "num_weights": 0})
        row["num_modules"] += 1
        row["num_weights"] += source.shapes[module][0] * source.shapes[module][1]
        if module in result.errors:
            error = result.errors[module]
            errors[key] = errors.get(key, WeightError()) + error
            worst[key] = max(worst.get(key, (0.0, "")), (error.relative, module))
    for key, error in errors.items():
        rows[key] |= {
            "relative_error": error.relative,
            "largest_error": error.largest,
            "worst_module": worst[key][1],
            "worst_relative_error": worst[key][0],
        }
    return {
        "modules": list(rows.values()),
        "source_bytes": result.source_bytes,
        "written_bytes": result.written_bytes,
        "num_resumed_files": result.num_resumed_files,
        "peak_rss_bytes": peak_rss_bytes() + result.workers_peak_rss_bytes,
    }


def print_table(report: dict[str, Any], terminal: Terminal) -> None:
    """Print what was quantised how, the errors where they were asked for, and what it took."""
    from rich.table import Table

    has_errors = any("relative_error" in row for row in report["modules"])
    table = Table(box=None, pad_edge=False)
    for head in ["modules", "scheme", "linears", "weights"] + ["error", "worst", "of"] * has_errors:
        table.add_column(head, overflow="fold")
    for row in report["modules"]:
        cells = [row["class"], row["scheme"], f"{row['num_modules']:,}", f"{row['num_weights']:,}"]
        if has_errors:
            cells += [
                f"{row['relative_error']:.2%}",
                f"{row['worst_relative_error']:.2%}",
                row["worst_module"],
            ]
        table.add_row(*cells)
    terminal.report(table)
    if has_errors:
        terminal.report("error: root mean square of the changes over that of the weights")
    workers = f" by {report['num_workers']} workers" if report["num_workers"] > 1 else ""
    terminal.report(
        f"{_size(report['source_bytes'])} became {_size(report['written_bytes'])} in "
        f"{report['conversion_s']:.1f} s{workers}, {_size(report['peak_rss_bytes'])} of memory: "
        f"{report['destination']}"
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
