"""What goes where: reports to standard output, progress and notes to standard error, one JSON line last."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PIPE_WIDTH = 100


class Terminal:
    """The streams of one command.

    With ``is_json`` the report goes to standard error, so that standard output holds the JSON line alone.

    Attributes:
        out: For the report.
        err: For notes and progress.
    """

    def __init__(self, *, is_json: bool = False, color: str = "auto"):
        forced = {"always": True, "never": False}.get(color)
        self.is_json = is_json
        self.err = _console(sys.stderr, forced)
        self.out = self.err if is_json else _console(sys.stdout, forced)

    def report(self, renderable: RenderableType = "") -> None:
        """Print part of the report; text is printed as it is, without markup."""
        is_text = isinstance(renderable, str)
        self.out.print(renderable, markup=False, highlight=False, soft_wrap=is_text, crop=False)

    def note(self, text: str) -> None:
        """Print one line about the run to standard error."""
        self.err.print(text, markup=False, highlight=False, soft_wrap=True)

    def json_line(self, value: Any) -> None:
        """Print the machine-readable line, if it was asked for; nothing must be printed after it."""
        if self.is_json:
            self.err.file.flush()
            is_ascii = not str(sys.stdout.encoding).lower().startswith("utf")  # no sign is lost elsewhere
            print(json.dumps(value, ensure_ascii=is_ascii, allow_nan=False), flush=True)

    @contextlib.contextmanager
    def progress(
        self, *, has_time_left: bool = True
    ) -> Iterator[Callable[[int, int | None, str], None] | None]:
        """Show a progress bar and yield what to call with (done, total, what); in a pipe yield None.

        Without ``has_time_left`` the time left is what the caller says of it.
        """
        if not self.err.is_terminal:
            yield None
            return
        clock = (TimeRemainingColumn(),) if has_time_left else ()
        columns = (BarColumn(), MofNCompleteColumn(), *clock, TextColumn("{task.description}"))
        with Progress(*columns, console=self.err, transient=True) as bar:
            task = bar.add_task("", total=None)

            def show(done: int, total: int | None, what: str) -> None:
                bar.update(task, completed=done, total=total, description=what)

            yield show


def _console(stream: Any, forced_color: bool | None) -> Console:
    if forced_color is None:
        return Console(file=stream, width=None if stream.isatty() else PIPE_WIDTH)
    return Console(file=stream, force_terminal=forced_color, no_color=not forced_color)
