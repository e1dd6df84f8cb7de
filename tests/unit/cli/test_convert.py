"""``convert`` finds its conversions."""

from __future__ import annotations

import pytest

from lean_laguna.cli.convert import CONVERSIONS
from lean_laguna.cli.main import main


def test_help_names_every_conversion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {name} " in text for name in CONVERSIONS)
    assert len(text.splitlines()) <= 24


@pytest.mark.parametrize("name", CONVERSIONS)
def test_each_has_a_help_of_its_own(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", name, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: lean-laguna convert {name} ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "convert what? known: quantize"),
        (["quantise"], "unknown conversion 'quantise'; did you mean 'quantize'?"),
        (["--scheme"], "unknown option '--scheme'"),
    ],
)
def test_unknown_words_are_named(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", *words]) == 2
    assert message in capsys.readouterr().err
