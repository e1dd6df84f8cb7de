"""The table of a conversion."""

from __future__ import annotations

from typing import Any

import pytest

from lean_laguna.cli.quantize_report import print_table
from lean_laguna.cli.terminal import Terminal

ROW = {"class": "shared", "scheme": "INT4 group 32", "num_modules": 21, "num_weights": 344_064}
REPORT: dict[str, Any] = {
    "modules": [ROW],
    "source_bytes": 66_885_234_176,
    "written_bytes": 4_200_000,
    "conversion_s": 12.34,
    "num_workers": 1,
    "peak_rss_bytes": 300_000_000,
    "destination": "made",
}


def test_sizes_are_in_units_that_fit_and_workers_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(REPORT, Terminal())
    assert (
        capsys.readouterr().out.splitlines()[-1]
        == "66.89 GB became 4.2 MB in 12.3 s, 300.0 MB of memory: made"
    )
    print_table(REPORT | {"num_workers": 2}, Terminal())
    assert "in 12.3 s by 2 workers, 300.0 MB" in capsys.readouterr().out


def test_errors_have_their_meaning_beside_them_and_names_stay_whole(
    capsys: pytest.CaptureFixture[str],
) -> None:
    worst = "model.layers.7.mlp.shared_expert.down_proj_of_a_very_long_name"
    errors = {"relative_error": 0.0962, "worst_relative_error": 0.1006, "worst_module": worst}
    print_table(REPORT | {"modules": [ROW | errors]}, Terminal())
    out = capsys.readouterr().out
    assert "9.62%" in out
    assert "10.06%" in out
    assert "root mean square" in out
    assert worst in out.replace("\n", "").replace(" ", "")
