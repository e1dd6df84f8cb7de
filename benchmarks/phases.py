"""A script in phases: what it found, its clock, and phases that fail alone. Nothing to run here."""

from __future__ import annotations

import argparse
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lean_laguna.core.provenance import describe_run

Run = Callable[[], Any]


class Phases:
    """A run of one script; subclasses measure.

    Attributes:
        found: What is written at the end; begins with what runs and where.
        tiny: On a CPU, to try the script itself.
        device: That of everything.
    """

    def __init__(self, args: argparse.Namespace):
        self.begin = time.monotonic()
        self.budget_s: float = args.budget
        self.tiny: bool = args.tiny
        self.device = "cpu" if args.tiny else "cuda"
        self.found: dict[str, Any] = {"errors": {}, **describe_run(None)}

    def left(self) -> float:
        """Return the seconds left."""
        return self.budget_s - (time.monotonic() - self.begin)

    def sync(self) -> None:
        """Wait for the device."""
        if not self.tiny:
            torch.cuda.synchronize()

    def graph(self, run: Run) -> Run:
        """Return a captured run."""
        if self.tiny:
            return run
        run()
        self.sync()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            run()
        return captured.replay

    def phase(self, name: str, body: Callable[[], Any], needs_s: float = 5.0) -> None:
        """Keep what a phase finds, or how it failed."""
        if self.left() < needs_s:
            self.found["errors"][name] = "skipped: out of time"
            return
        before = time.monotonic()
        try:
            self.found[name] = body()
        except Exception:
            self.found["errors"][name] = traceback.format_exc()
            print(f"FAILED {name}\n{traceback.format_exc()[-1500:]}", flush=True)
        print(f"-- {name}: {time.monotonic() - before:.1f} s", flush=True)

    def write(self, path: Path) -> None:
        """Write what was found."""
        self.found["seconds"] = round(time.monotonic() - self.begin, 1)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.found, indent=1, default=str))
