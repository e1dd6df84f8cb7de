import io
import json
import sys
import types

import pytest

from lean_laguna.cli import main as module
from lean_laguna.cli.main import main
from lean_laguna.cli.terminal import Terminal
from lean_laguna.core.errors import CheckpointError


@pytest.fixture
def command(monkeypatch):
    """Put a stand-in in place of ``generate``; its ``run`` does what the test says."""
    from lean_laguna.cli import generate

    stand_in = types.SimpleNamespace(build_parser=generate.build_parser, run=lambda args: 0)
    monkeypatch.setattr(module.importlib, "import_module", lambda name: stand_in)
    return stand_in


def test_the_status_of_a_command_is_passed_on(command):
    for status in (0, 1):
        command.run = lambda args, status=status: status
        assert main(["generate", "x"]) == status


def test_a_mistake_is_one_line_and_status_2(command, capsys):
    def run(args):
        raise CheckpointError("bad\nfile  here")

    command.run = run
    assert main(["generate", "x"]) == 2
    assert capsys.readouterr().err == "lean-laguna: error: bad file here\n"


def test_an_interrupt_is_status_130_without_a_traceback(command, capsys):
    def run(args):
        raise KeyboardInterrupt

    command.run = run
    assert main(["generate", "x"]) == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_a_stream_of_an_older_encoding_takes_any_text(encoding, command, monkeypatch):
    text = "a × \u2588 \u4e2d"
    streams = {name: io.TextIOWrapper(io.BytesIO(), encoding=encoding) for name in ("stdout", "stderr")}
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)

    def run(args):
        terminal = Terminal(is_json=True)
        terminal.report(text)
        terminal.json_line({"a": text})
        return 0

    command.run = run
    assert main(["generate", "x"]) == 0
    written = {}
    for name, stream in streams.items():
        stream.flush()
        written[name] = stream.buffer.getvalue()
    expected = {"ascii": "a x # ?", "latin-1": "a × # ?", "utf-8": text}[encoding]
    assert written["stderr"].decode(encoding).strip() == expected
    assert json.loads(written["stdout"].decode(encoding)) == {"a": text}


def test_a_fault_of_ours_is_not_swallowed(command):
    def run(args):
        raise ZeroDivisionError

    command.run = run
    with pytest.raises(ZeroDivisionError):
        main(["generate", "x"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["genrate"], "unknown command 'genrate'; did you mean 'generate'?"),
        (["--model", "nano"], "unknown option '--model'; the command comes first"),
        (["generate", "--temprature", "1"], "unknown option '--temprature'; did you mean '--temperature'?"),
        (["generate", "--max-token=5"], "unknown option '--max-token'; did you mean '--max-tokens'?"),
        (["generate", "--zzz"], "unknown option '--zzz' (see"),
        (["bench", "word"], "unexpected argument 'word'"),
        (["generate", "--device", "tpu"], "--device: must be one of auto, cpu, cuda, found 'tpu'"),
        (
            ["generate", "--num-speculative-tokens", "-1"],
            "must be a whole number from 0, or auto, found '-1'",
        ),
        (["sweep", "--draft-lengths", "3,x"], "must be a whole number from 1, found 'x'"),
        (["bench", "--repeats", "0"], "must be a whole number from 1, found '0'"),
        (["generate", "--logit-bias", "5"], "must be ID=BIAS such as 42=-5, found '5'"),
        (["generate", "--drafter"], "--drafter: expected one argument"),
    ],
)
def test_wrong_words_name_what_was_found_and_what_would_be_right(words, message, capsys):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_no_command_shows_the_help_and_is_a_mistake(capsys):
    assert main([]) == 2
    assert "usage:" in capsys.readouterr().out


def test_a_full_disk_is_one_line_and_status_2(command, capsys):
    for place, told in (((), ""), (("out.json",), "out.json: ")):

        def run(args, place=place):
            raise OSError(28, "No space left on device", *place)

        command.run = run
        assert main(["generate", "x"]) == 2
        assert capsys.readouterr().err == f"lean-laguna: error: {told}No space left on device\n"


@pytest.mark.parametrize("name", ["stdin", "stdout", "stderr"])
def test_a_closed_standard_stream_is_stood_in_for(command, monkeypatch, name):
    monkeypatch.setattr(sys, name, None)
    command.run = lambda args: 0 if getattr(sys, name).isatty() is False else 1
    assert main(["generate", "x"]) == 0
    getattr(sys, name).close()


@pytest.mark.parametrize("flag", ["--out", "--html"])
def test_an_empty_output_path_is_refused_before_the_work(flag, capsys):
    assert main(["bench", flag, ""]) == 2
    assert "it is a folder; give a file name" in capsys.readouterr().err


def test_what_a_file_made_up_neither_fills_nor_steers_the_terminal(command, capsys):
    def run(args):
        raise CheckpointError(f"found '\x1b[2J\x07{'9' * 100_000}'; expected 3")

    command.run = run
    assert main(["generate", "x"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(r"lean-laguna: error: found '\x1b[2J\x07999")
    assert err.endswith("999'; expected 3\n")
    assert len(err) < 2100
