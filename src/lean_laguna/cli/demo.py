"""The first thing a newcomer sees: one model writing the same Python twice, side by side, and how fast."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lean_laguna.backends.local import LocalBackend
from lean_laguna.bench.rounds import Plan
from lean_laguna.cli.drafts import DRAFT_STYLE, DraftColours, harmless
from lean_laguna.core.types import RequestOutput
from lean_laguna.tasks.prompts import load_prompts

if TYPE_CHECKING:
    from lean_laguna.cli.terminal import Terminal

SHOWN_PROMPT = "lru_cache"
REFRESH_PER_SECOND = 12


class _Side:
    """One of the two texts as it grows."""

    def __init__(self, title: str, backend: LocalBackend, plan: Plan, prompt: str):
        self.title, self.backend, self.prompt = title, backend, prompt
        self.params = dataclasses.replace(plan.params_of(0), n=1)
        self.colours = DraftColours(backend.llm.tokenizer, self.params)
        self.text = Text(prompt, style="dim")
        self.rate: float | None = None

    def take(self, output: RequestOutput) -> None:
        """Add what is new in ``output``."""
        completion, times = output.outputs[0], output.times
        for piece, is_draft in self.colours.new_pieces(completion):
            self.text.append(harmless(piece), style=DRAFT_STYLE if is_draft else "not dim")
        if times.first_token_s is not None and times.last_token_s is not None:
            seconds = times.last_token_s - times.first_token_s
            self.rate = (len(completion.token_ids) - 1) / seconds if seconds else None

    def panel(self, *, is_running: bool) -> Panel:
        """Return the text in its frame, with the speed so far."""
        speed = f": {self.rate:.0f} tok/s" if self.rate else ""
        return Panel(self.text, title=self.title + speed, border_style="green" if is_running else "dim")


def show_text(baseline: LocalBackend, drafting: LocalBackend, plan: Plan, terminal: Terminal) -> None:
    """Let both sides continue one prompt; on a terminal the text appears as it is written.

    The speeds shown here include the drawing; the measurement comes afterwards, without it.
    """
    whole_set = load_prompts(plan.prompts.name).prompts
    prompt = {p.id: p.prompt for p in whole_set}.get(SHOWN_PROMPT, whole_set[0].prompt)
    for backend in (baseline, drafting):  # the first generation pays for set-up
        backend.generate([prompt], dataclasses.replace(plan.params_of(0), max_tokens=16))
    sides = [
        _Side("without drafter", baseline, plan, prompt),
        _Side("with drafter", drafting, plan, prompt),
    ]
    console = terminal.out
    terminal.report(Text("A Laguna model writes Python, without a drafter and with one.", style="bold"))
    if console.is_terminal:
        with Live(console=console, transient=True, refresh_per_second=REFRESH_PER_SECOND) as live:
            for side in sides:
                for output in side.backend.llm.stream(side.prompt, side.params):
                    side.take(output)
                    live.update(_beside(sides, side))
    else:
        for side in sides:
            *_, last = side.backend.llm.stream(side.prompt, side.params)
            side.take(last)
    legend = Text.assemble(
        "  dim: the prompt · ", ("green: accepted draft tokens", DRAFT_STYLE), " · the rest: the target's own"
    )
    terminal.report(Group(_beside(sides, None), legend if console.is_terminal else Text(), Text()))


def show_next(terminal: Terminal) -> None:
    """Say what to try next."""
    terminal.report(
        Text.assemble(
            "\nnext: ",
            ("lean-laguna generate 'def fib(n):' --show-drafts", "bold"),
            "   all commands: ",
            ("lean-laguna --help", "bold"),
        )
    )


def _beside(sides: list[_Side], running: _Side | None) -> Table:
    grid = Table.grid(expand=True)
    for _ in sides:
        grid.add_column(ratio=1)
    grid.add_row(*(side.panel(is_running=side is running) for side in sides))
    return grid
