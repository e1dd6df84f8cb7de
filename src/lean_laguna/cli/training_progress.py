"""Progress of a training run: a bar with the time left on a terminal, a plain line now and then in a pipe."""

from __future__ import annotations

import contextlib
import time
from typing import Any

from lean_laguna.cli.terminal import Terminal
from lean_laguna.train.loop import plain_line

PIPE_SECONDS = 5.0  # at least so long between two step lines; the log file has all
WHOLE = 100


class TrainingProgress:
    """Shows the events of a training log; a context manager that owns the bar."""

    def __init__(self, terminal: Terminal):
        self._terminal = terminal
        self._stack = contextlib.ExitStack()
        self._bar: Any = None
        self._last_line = float("-inf")

    def __enter__(self) -> TrainingProgress:
        """Open the bar, where there is a terminal."""
        self._bar = self._stack.enter_context(self._terminal.progress(has_time_left=False))
        if self._bar is not None:
            self._bar(0, None, "reading text and weights")
        return self

    def __exit__(self, *exception: object) -> None:
        """Close it."""
        self._stack.close()

    def show(self, kind: str, values: dict[str, Any]) -> None:
        """Show one event: steps and answers move the bar, the rest are lines."""
        if kind not in ("step", "answers"):
            self._terminal.note(plain_line(kind, values))
        elif self._bar is not None and kind == "step":
            done = WHOLE if values.get("eta_s") == 0 else round(values["progress"] * WHOLE)
            self._bar(done, WHOLE, _what(values))
        elif self._bar is not None:
            self._bar(values["answered"], values["of"], f"{values['tok_per_s']:,} tokens/s{_left(values)}")
        elif time.monotonic() - self._last_line >= PIPE_SECONDS:
            self._last_line = time.monotonic()
            self._terminal.note(plain_line(kind, values))


def _what(values: dict[str, Any]) -> str:
    return (
        f"step {values['step']:,}, loss {values['loss']:.3f}, {values['tok_per_s']:,} tokens/s{_left(values)}"
    )


def _left(values: dict[str, Any]) -> str:
    if "eta_s" not in values:
        return ""
    if "step" in values and not values["eta_s"]:
        return ", measuring on held-out text"
    minutes, seconds = divmod(int(values["eta_s"]), 60)
    return f", {minutes}:{seconds:02} left"
