import json

from lean_laguna.cli.terminal import Terminal


def test_a_report_goes_to_standard_output_and_notes_do_not(capsys):
    terminal = Terminal()
    terminal.report("report [bold]as is[/bold]")
    terminal.note("note")
    terminal.json_line({"a": 1})
    captured = capsys.readouterr()
    assert captured.out == "report [bold]as is[/bold]\n"
    assert captured.err == "note\n"


def test_with_json_standard_output_is_one_line_of_it(capsys):
    terminal = Terminal(is_json=True)
    terminal.report("report")
    terminal.json_line({"a": "é"})
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"a": "é"}
    assert captured.out.count("\n") == 1
    assert captured.err == "report\n"


def test_a_pipe_has_no_progress_bar(capsys):
    terminal = Terminal()
    with terminal.progress() as progress:
        assert progress is None
    assert capsys.readouterr().err == ""


def test_a_terminal_shows_progress_and_leaves_nothing_behind(monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal(color="always")
    with terminal.progress() as progress:
        progress(3, 10, "third of ten")
    assert "third of ten" in capsys.readouterr().err


def test_colour_can_be_forced_and_forbidden():
    assert Terminal(color="always").out.is_terminal
    assert not Terminal(color="never").out.is_terminal
