import io

import pytest
from rich.console import Console

from lean_laguna.plan.bandwidth import bandwidth_of_card
from lean_laguna.plan.inspect_report import inspection_report
from lean_laguna.plan.inspection import Question, inspect
from lean_laguna.plan.subject import drafter_of, target_of, target_of_shape


def shown(found, width=80):
    console = Console(file=io.StringIO(), width=width)
    console.print(inspection_report(found))
    return console.file.getvalue()


@pytest.fixture(scope="module")
def spark():
    target = target_of_shape("laguna-xs-2.1", "nvfp4")
    return inspect(target, drafter_of("laguna-xs-2.1"), Question(bandwidth_of_card("gb10")))


def row_of(text, label):
    return next(line.split() for line in text.splitlines() if line.strip().startswith(label))


def test_both_accountings_are_read_off_one_table(spark):
    text = shown(spark)
    attention = row_of(text.partition("one token reads")[2], "attention")
    assert attention[-1] == "82.2%"
    assert "68.4%" in attention
    assert row_of(text, "all")[-2:] == ["3.48", "GB"]
    assert row_of(text, "at most")[-2:] == ["78", "tok/s"]
    assert "65 tok/s" in text


def test_nothing_is_cut_on_a_narrow_terminal(spark):
    text = shown(spark)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_table_of_rows_has_a_line_for_each(spark):
    text = shown(spark)
    assert row_of(text, "7 ") == ["7", "51.0", "7.15", "GB", "26.20", "1.71", "31.09", "5.04", "2.03", "162"]


@pytest.mark.parametrize(
    "hashes", [{}, {"a.safetensors": ("f" * 64, False)}, {"a.safetensors": ("f" * 64, True)}]
)
def test_files_are_called_whole_or_not(hashes):
    found = inspect(target_of("nano"), None, Question(bandwidth_of_card("h200")))
    assert "whole: 2 files" in shown(found)
    found["files"] |= {"problems": ["x.safetensors: missing"], "hashes": hashes}
    text = shown(found)
    assert "not whole: 2 files" in text
    assert "x.safetensors: missing" in text
    assert ("NOT as published" in text) == any(not ok for _, ok in hashes.values())
