import io
import re

import pytest

from lean_laguna.cli.terminal import Terminal
from lean_laguna.cli.training_progress import TrainingProgress

STEP = {
    "step": 25,
    "progress": 0.5,
    "loss": 2.125,
    "lr": 1e-3,
    "grad_norm": 1.0,
    "tok_per_s": 1900,
    "eta_s": 125,
}


def test_a_pipe_gets_plain_lines_and_not_too_many(capsys):
    with TrainingProgress(Terminal()) as progress:
        for _ in range(3):
            progress.show("step", STEP)
        progress.show("val", {"step": 25, "val_top1": 0.5})
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("step ")
    assert "eta_s=125" in lines[0]
    assert lines[1] == "val       step=25 val_top1=0.5"


def test_answers_move_the_bar_or_are_lines_now_and_then(capsys):
    event = {"answered": 3, "of": 12, "tok_per_s": 1500}
    with TrainingProgress(Terminal()) as progress:
        for _ in range(3):
            progress.show("answers", event)
    assert capsys.readouterr().err.splitlines() == ["answers   answered=3 of=12 tok_per_s=1500"]
    terminal = Terminal(color="always")
    terminal.err.file = screen = io.StringIO()
    with TrainingProgress(terminal) as progress:
        progress.show("answers", event)
        progress.show("answers", event | {"eta_s": 75})
        progress.show("final", {})
    assert "3/12" in screen.getvalue()
    assert "1,500 tokens/s, 1:15 left" in screen.getvalue()


def test_a_terminal_gets_a_bar_with_the_time_left():
    terminal = Terminal(color="always")
    terminal.err.file = screen = io.StringIO()
    with TrainingProgress(terminal) as progress:
        progress.show("step", STEP)
        progress.show("final", {"step": 50})
    assert "step 25, loss 2.125, 1,900 tokens/s, 2:05 left" in screen.getvalue()
    assert "final     step=50" in screen.getvalue()


@pytest.mark.parametrize(
    ("event", "told"),
    [
        (("start", {"parameters": 3}), "0/? reading text and weights"),
        (("step", STEP | {"progress": 0.96, "eta_s": 0}), "100/100 step 25, loss 2.125, 1,900 tokens/s, "),
    ],
)
def test_a_bar_says_what_it_waits_for_before_the_first_step_and_after_the_last(event, told):
    terminal = Terminal(color="always")
    terminal.err.file = screen = io.StringIO()
    with TrainingProgress(terminal) as progress:
        progress.show(*event)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.getvalue())
    assert told in plain
    assert ("measuring on held-out text" in plain) == ("step" in event)
    assert ":" not in plain  # one time left, and none that is over
