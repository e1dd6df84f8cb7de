import importlib
import re
import shlex
import subprocess
import sys

import pytest

from lean_laguna.cli.convert import CONVERSIONS
from lean_laguna.cli.main import COMMANDS, HELP, main

SCREEN_LINES, SCREEN_WIDTH = 24, 100


# Of ``convert`` each conversion has its own.
MODULES = [name for name in COMMANDS if name != "convert"] + list(CONVERSIONS.values())
PARSERS = [importlib.import_module(f"lean_laguna.cli.{name}").build_parser() for name in MODULES]


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.prog)
def test_help_fits_a_screen_and_ends_with_an_example(parser):
    lines = parser.format_help().splitlines()
    assert len(lines) <= SCREEN_LINES
    assert max(map(len, lines)) <= SCREEN_WIDTH
    assert lines[0].startswith(f"usage: {parser.prog}")
    assert f"example: {parser.prog}" in lines[-1]


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.prog)
def test_help_names_every_flag_and_no_other(parser):
    shown = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", parser.format_help()))
    assert shown | {"--help"} == set(parser.option_strings())


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.prog)
def test_the_example_parses(parser):
    example = parser.format_help().splitlines()[-1].partition(parser.prog)[2]
    assert not parser.parse_strictly(shlex.split(example)).help


def test_the_top_help_names_every_command_and_fits(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert text == HELP
    assert all(f"\n  {name} " in text for name in COMMANDS)
    assert len(text.splitlines()) <= SCREEN_LINES


@pytest.mark.parametrize("words", [["--help"], ["generate", "--help"], ["bench", "-h"], ["--version"]])
def test_help_does_not_load_torch(words):
    code = (
        "import sys; from lean_laguna.cli.main import main; "
        f"status = main({words!r}); assert not {{'torch', 'rich'}} & set(sys.modules); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
