"""What makes a killed run go on: whose state a work folder holds, and whether this run may use it.

A work folder holds ``run.json`` (recipe and checksums of the inputs), ``state.pt`` (weights, moments, step)
and, for a drafter, ``text.pt`` (what the target wrote).
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from lean_laguna.core.errors import ConfigError
from lean_laguna.core.files import atomic_write_json, hold_folder, remove_unfinished

ResumeMode = Literal["auto", "yes", "no"]
# What reading a file of torch.save may raise when it is cut short or something else.
DAMAGE = (
    KeyError,
    IndexError,
    TypeError,
    ValueError,
    RuntimeError,
    EOFError,
    OSError,
    pickle.UnpicklingError,
)
STATE, TEXT, IDENTITY = "state.pt", "text.pt", "run.json"


def open_run(work: Path, identity: dict[str, Any], resume: ResumeMode = "auto") -> bool:
    """Prepare a work folder for a run and say whether there is a state to go on from.

    Args:
        work: The folder; made if it is missing.
        identity: Recipe and inputs; all that must be the same for the state to be of use.
        resume: ``auto`` goes on where a state lies, ``yes`` insists on one, ``no`` starts anew and removes
            the old one.

    Raises:
        ConfigError: The state belongs to another run, or there is none and ``resume`` is ``yes``, or another
            process is training there.
    """
    work.mkdir(parents=True, exist_ok=True)
    # Of several processes of one run, as torchrun counts them, one changes files: another could remove what
    # it is about to give its name.
    is_first = os.environ.get("RANK", "0") == "0"
    if is_first:
        hold_folder(work)
        remove_unfinished(work)
    mine = json.loads(json.dumps(identity))
    has_state = (work / STATE).exists() and resume != "no"
    if resume == "yes" and not has_state:
        raise ConfigError(f"--resume yes: '{work}' holds no state to go on from; leave it out to start")
    theirs = _stored(work / IDENTITY)
    if has_state and theirs is None:
        raise ConfigError(
            f"'{work / IDENTITY}' is missing or damaged, so nothing says whose the state beside it is; "
            "start anew with --resume no, or give another folder with --work"
        )
    if has_state and theirs != mine:
        raise ConfigError(
            f"'{work}' holds the state of another run: {difference(theirs, mine)}; start anew with "
            "--resume no, or give another folder with --work"
        )
    if is_first and (resume == "no" or theirs != mine):
        for name in (STATE, TEXT, IDENTITY):
            (work / name).unlink(missing_ok=True)
        atomic_write_json(work / IDENTITY, mine)
    return has_state


def _stored(path: Path) -> dict[str, Any] | None:
    """Return what a run wrote about itself; None where it is missing or damaged."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def difference(theirs: Any, mine: Any) -> str:
    """Return the first value that differs by its name, as ``recipe.optimizer.lr was 0.003 and is 0.002``."""
    old, new = dict(_leaves(theirs, "")), dict(_leaves(mine, ""))
    for name in [*new, *old]:
        if old.get(name) != new.get(name):
            return f"{name} was {old.get(name)!r} and is {new.get(name)!r}"
    return "its files differ"


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value
