"""The training loop shared by target and drafter: budget, schedule, log, validation, checkpoints, resume.

What is trained is a :class:`Task`; the loop knows nothing about models.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from lean_laguna.core.errors import CheckpointError, DataError
from lean_laguna.core.files import atomic_write_bytes, atomic_writer, hold_folder, remove_unfinished
from lean_laguna.train.optimizer import AnyOptimizer, make_optimizer
from lean_laguna.train.processes import (
    Processes,
    load_optimizer_state,
    load_whole,
    whole,
    whole_optimizer_state,
    whole_state,
)
from lean_laguna.train.recipe import OptimizerRecipe
from lean_laguna.train.run_state import DAMAGE, STATE
from lean_laguna.train.schedule import Budget, learning_rate

_MAX_ROLLBACKS = 2
# A step after so long is told of and may be saved, whatever 'log_every' says. Not of several processes: their
# clocks differ, and they must look at the same steps.
_SLOW_SECONDS = 10.0
Echo = Callable[[str, dict[str, Any]], None]


class Task(Protocol):
    """What the loop trains. Everything random depends on the step number alone, so that resuming is exact."""

    @property
    def module(self) -> nn.Module:
        """The module whose parameters (those that require gradients) and buffers are trained and saved."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens or block rows per step, for the rate in the log."""

    def loss(self, step: int) -> Tensor:
        """Return the scalar loss of a batch; with accumulation, several batches make a step."""

    def details(self) -> dict[str, Any]:
        """Return what a step's line in the log holds besides the loss; may wait for the device."""

    def after_step(self, progress: float) -> None:
        """Do what follows an optimiser step."""

    def validate(self) -> dict[str, float]:
        """Score held-out data."""

    def export(self) -> None:
        """Write the model as others read it, atomically."""


def plain_line(kind: str, values: dict[str, Any]) -> str:
    """Return one readable line for an event of the log."""
    shown = " ".join(f"{k}={_short(v)}" for k, v in values.items() if not isinstance(v, dict | list))
    return f"{kind:9} {shown}"


def print_event(kind: str, values: dict[str, Any]) -> None:
    """Print an event to standard error."""
    print(plain_line(kind, values), file=sys.stderr, flush=True)


@dataclass
class RunLog:
    """One JSON object a line in a file; each is shown to whoever watches, too.

    Attributes:
        path: The JSONL file, appended to.
        echo: Receives each event's kind and values.
        is_silent: Neither written nor shown: another process does it.
    """

    path: Path
    echo: Echo = print_event
    is_silent: bool = False

    def open(self, *, is_resumed: bool) -> None:
        """Make the folder, this run's alone from here on: checkpoints go there, too.

        A run that starts anew drops the log of an earlier one; what a killed one left half written goes too.

        Raises:
            ConfigError: Another process is training with this folder.
            DataError: The log of the run that goes on is damaged before its last line.
        """
        if self.is_silent:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        hold_folder(self.path.parent)
        remove_unfinished(self.path.parent)
        if not is_resumed:
            self.path.unlink(missing_ok=True)
        elif self.path.exists():
            whole, end, half = self.path.read_bytes().rpartition(b"\n")
            if half:  # a full disk or a kill cut it off
                atomic_write_bytes(self.path, whole + end)
            self._rows()

    def go_back_to(self, step: int) -> None:
        """Drop what a killed run logged after the state that it left: those steps are taken again."""
        if self.is_silent or not self.path.exists():
            return
        kept = [line for line, row in self._rows() if row["event"] == "start" or row.get("step", 0) <= step]
        atomic_write_bytes(self.path, b"".join(line + b"\n" for line in kept))

    def _rows(self) -> list[tuple[bytes, dict[str, Any]]]:
        rows = []
        for number, line in enumerate(self.path.read_bytes().split(b"\n")[:-1], 1):
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict) or "event" not in row:
                raise DataError(
                    f"'{self.path}', line {number}: not an event of a log; move the file away, or start anew "
                    "with --resume no"
                )
            rows.append((line, row))
        return rows

    def write(self, kind: str, **values: Any) -> None:
        """Log one event."""
        if self.is_silent:
            return
        row = {"event": kind, "time": round(time.time(), 2), **values}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        self.echo(kind, values)


@dataclass
class _State:
    """What a checkpoint holds besides weights and moments."""

    step: int = 0
    elapsed_s: float = 0.0
    lr_scale: float = 1.0


def train(
    task: Task,
    optimizer_recipe: OptimizerRecipe,
    budget: Budget,
    folder: Path,
    log: RunLog,
    *,
    val_every_s: float,
    save_every_s: float,
    log_every: int = 25,
    accumulate: int = 1,
    processes: Processes = Processes(),  # noqa: B008 (frozen)
) -> dict[str, float]:
    """Train until the budget is used, then validate and export.

    Resumes from the state in ``folder`` if there is one. With a step budget the weights do not depend on
    where a run was cut; with a time budget the clock goes on from where it stood.

    Returns:
        The last validation's figures.

    Raises:
        DataError: The loss was not finite three times, each time after going back to the last checkpoint with
            half the learning rate.
    """
    optimizer = make_optimizer(task.module, optimizer_recipe)
    folder.mkdir(parents=True, exist_ok=True)
    state_path = folder / STATE
    state, rollbacks = _resume(state_path, task, optimizer, log, processes), 0
    last_val = last_save = last_log = time.monotonic()
    started, logged_step = last_log - state.elapsed_s, state.step

    def used() -> float:
        state.elapsed_s = time.monotonic() - started
        return budget.progress(state.step, state.elapsed_s)

    progress = used()
    while progress < 1.0:
        rate = learning_rate(optimizer_recipe, progress) * state.lr_scale
        loss, norm = _step(task, optimizer, rate, optimizer_recipe.clip, state.step, accumulate)
        state.step += 1
        task.after_step(progress)
        taken, progress = progress, used()
        is_slow = time.monotonic() - last_log >= _SLOW_SECONDS and processes.count == 1
        is_told = state.step % log_every == 0 or state.step == 1 or is_slow
        if not is_told and progress < 1.0:  # the last step is looked at, too: what it leaves is exported
            continue
        value, size = float(processes.mean(loss)), float(whole(norm))  # waits for the device
        now = time.monotonic()
        if not math.isfinite(value + size):
            rollbacks += 1
            if rollbacks > _MAX_ROLLBACKS or not state_path.exists():
                raise DataError(f"the loss is {value} at step {state.step}; lower 'lr' in the recipe")
            state = _restore(state_path, task, optimizer, processes, 0.5 * state.lr_scale)
            log.write("rollback", step=state.step, lr_scale=state.lr_scale)
            started, logged_step, last_log = now - state.elapsed_s, state.step, now
            progress = used()
            continue
        if not is_told:
            break
        per_second = (state.step - logged_step) / max(1e-9, now - last_log)
        log.write(
            "step", step=state.step, progress=round(taken, 4), loss=round(value, 4), lr=rate,
            grad_norm=round(size, 3), tok_per_s=round(per_second * task.tokens_per_step),
            eta_s=round(_seconds_left(budget, state.step, now - started, per_second)), **task.details(),
        )  # fmt: skip
        logged_step = state.step
        if processes.agree(now - last_val >= val_every_s and progress < 0.97):
            log.write("val", step=state.step, **task.validate())
            last_val = time.monotonic()
        if processes.agree(now - last_save >= save_every_s and used() < 1.0):
            _save(state_path, task, optimizer, state, processes)
            task.export()
            last_save = time.monotonic()
        progress, last_log = used(), time.monotonic()  # what has just been done is no part of a step
    task.export()  # first: what is on disk survives a limit that strikes during validation
    _save(state_path, task, optimizer, state, processes)
    result = task.validate()
    log.write("final", step=state.step, elapsed_s=round(time.monotonic() - started, 1), **result)
    return result


def _step(
    task: Task, optimizer: AnyOptimizer, rate: float, clip: float, step: int, accumulate: int
) -> tuple[Tensor, Tensor]:
    """Take one step on the mean gradient of ``accumulate`` batches; returns their mean loss and the norm."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)
    total = torch.zeros(())
    for batch in range(accumulate):
        loss = task.loss(step * accumulate + batch) / accumulate
        loss.backward()
        total = total.to(loss.device) + loss.detach()
    norm = nn.utils.clip_grad_norm_([p for p in task.module.parameters() if p.grad is not None], clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total, norm


def _seconds_left(budget: Budget, step: int, elapsed_s: float, steps_per_s: float) -> float:
    if budget.seconds is not None:
        return max(0.0, budget.seconds - elapsed_s)
    return max(0, (budget.steps or 0) - step) / max(1e-9, steps_per_s)


def _save(path: Path, task: Task, optimizer: AnyOptimizer, state: _State, processes: Processes) -> None:
    """Write beside, then rename: a kill leaves the old file or the new one, never half of one."""
    held = {
        "module": whole_state(task.module, processes),
        "optimizer": whole_optimizer_state(task.module, optimizer, processes),
        "state": {"step": state.step, "elapsed_s": state.elapsed_s, "lr_scale": state.lr_scale},
    }
    if processes.is_first:
        with atomic_writer(path) as file:
            torch.save(held, file)
    processes.wait()


def _resume(path: Path, task: Task, optimizer: AnyOptimizer, log: RunLog, processes: Processes) -> _State:
    """Load the state that an earlier run left, if there is one, and bring the log to where it stands."""
    state = _restore(path, task, optimizer, processes)
    if state.step:
        log.go_back_to(state.step)
        log.write("resume", step=state.step, elapsed_s=round(state.elapsed_s, 1))
    return state


def _restore(
    path: Path, task: Task, optimizer: AnyOptimizer, processes: Processes, lr_scale: float | None = None
) -> _State:
    """Load the state if there is one, maybe with another scale; otherwise return a fresh one."""
    if not path.exists():
        return _State()
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
        load_whole(task.module, held["module"], processes)
        load_optimizer_state(task.module, optimizer, held["optimizer"], processes)
    except DAMAGE as error:
        raise CheckpointError(
            f"'{path}' does not fit this recipe or is damaged: {error}; remove it to start anew"
        ) from None
    return _State(**held["state"] | ({} if lr_scale is None else {"lr_scale": lr_scale}))


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
