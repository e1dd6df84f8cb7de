import io

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


def test_a_terminal_gets_a_bar_with_the_time_left():
    terminal = Terminal(color="always")
    terminal.err.file = screen = io.StringIO()
    with TrainingProgress(terminal) as progress:
        progress.show("step", STEP)
        progress.show("final", {"step": 50})
    assert "step 25, loss 2.125, 1,900 tokens/s, 2:05 left" in screen.getvalue()
    assert "final     step=50" in screen.getvalue()
