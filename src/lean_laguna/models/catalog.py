"""Names of models to folders on this machine. Nothing is ever downloaded.

A name is looked up in this order: a name of the package (``nano``), a folder, a Hugging Face repository that
is already in the local cache (``owner/name`` or ``owner/name@revision``).
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lean_laguna.core.env import hf_hub_cache
from lean_laguna.core.errors import CheckpointError, nearest

Role = Literal["target", "drafter"]
ASSETS = Path(__file__).resolve().parent.parent / "assets"
DEFAULT_MODEL = "nano"
_LONGEST_NAME = 1024
_MOST_LOOKED_AT = 1000
_REPO_ID = re.compile(r"(?P<owner>[\w.-]+)/(?P<name>[\w.-]+?)(?:@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True)
class CatalogEntry:
    """A model that comes with the package.

    Attributes:
        folder: Where it lies.
        role: Target or drafter.
        drafter: Name of the drafter made for it.
    """

    folder: Path
    role: Role
    drafter: str | None = None


BUILT_IN = {
    "nano": CatalogEntry(ASSETS / "laguna-nano", "target", drafter="nano-dflash"),
    "nano-dflash": CatalogEntry(ASSETS / "laguna-nano-dflash", "drafter"),
    "nano-dspark": CatalogEntry(ASSETS / "laguna-nano-dspark", "drafter"),
}
# The drafter that the publisher made for each published target.
PUBLISHED_DRAFTERS = {
    "poolside/Laguna-XS.2": "poolside/Laguna-XS.2-speculator.dflash",
    "poolside/Laguna-XS-2.1": "poolside/Laguna-XS-2.1-DFlash",
    "poolside/Laguna-S-2.1": "poolside/Laguna-S-2.1-DFlash",
}


def resolve_model(name: str | os.PathLike[str]) -> Path:
    """Return the checkpoint folder that a name stands for.

    Args:
        name: A built-in name, a folder, or a repository id with an optional ``@revision``.

    Raises:
        CheckpointError: Nothing on this machine has this name; says what would get it here.
    """
    text = os.fspath(name)
    if text in BUILT_IN:
        folder = BUILT_IN[text].folder
        if not (folder / "config.json").is_file():
            raise CheckpointError(
                f"model '{text}' is part of the package but its folder {folder} is not; reinstall it"
            )
        return folder
    if len(os.fsencode(text)) > _LONGEST_NAME or "\0" in text:
        raise CheckpointError(
            f"no model has the name {text[:60]!r}...: it is too long or holds a null character"
        )
    path = Path(text).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise CheckpointError(f"{path}: not a checkpoint folder: it holds no config.json")
        return path
    if path.exists():
        raise CheckpointError(f"{path}: a model is a folder with config.json and *.safetensors, found a file")
    match = _REPO_ID.fullmatch(text)
    if match and not text.startswith((".", "/", "~")):
        return _cached_repository(match["owner"], match["name"], match["revision"])
    if os.sep in text:
        raise CheckpointError(f"{path}: no such folder{_close_folder(path)}")
    hint = _close_folder(path) or nearest(text, BUILT_IN)
    raise CheckpointError(
        f"unknown model '{text}'{hint} (a model is a built-in name, a checkpoint folder, "
        "or the id of a downloaded repository such as poolside/Laguna-XS.2)"
    )


def _close_folder(path: Path) -> str:
    """Return a hint that names a checkpoint folder beside ``path`` of almost its name; "" for none."""
    beside = []
    with contextlib.suppress(OSError):
        folders = itertools.islice(path.parent.iterdir(), _MOST_LOOKED_AT)
        beside = [folder.name for folder in folders if (folder / "config.json").is_file()]
    close = difflib.get_close_matches(path.name, sorted(beside), n=1, cutoff=0.6)
    return f"; did you mean '{path.parent / close[0]}'?" if close else ""


def default_drafter(name: str) -> str | None:
    """Return the name of the drafter made for a target, or None where none is known."""
    if name in BUILT_IN:
        return BUILT_IN[name].drafter
    return PUBLISHED_DRAFTERS.get(name.partition("@")[0])


def _cached_repository(owner: str, name: str, revision: str | None) -> Path:
    """Find a repository in the Hugging Face cache.

    Source: the cache layout of huggingface_hub: models--OWNER--NAME/refs/REVISION holds a commit, whose files
    are in snapshots/COMMIT.
    """
    cache = hf_hub_cache()
    repository = cache / f"models--{owner}--{name}"
    wanted = revision or "main"
    ref = repository / "refs" / wanted
    commit = ref.read_text(encoding="utf-8").strip() if ref.is_file() else wanted
    snapshot = repository / "snapshots" / commit
    at = f" --revision {revision}" if revision else ""
    command = f"hf download {owner}/{name}{at}"
    label = f"{owner}/{name}" + (f"@{revision}" if revision else "")
    if not snapshot.is_dir():
        raise CheckpointError(
            f"model '{label}' is neither a folder here nor in {cache}"
            f"{_close_folder(Path(owner, name)) or '; nothing is downloaded unasked.'} "
            f"To fetch it, run: {command}"
        )
    if not (snapshot / "config.json").is_file() or not any(snapshot.glob("*.safetensors")):
        raise CheckpointError(
            f"model '{label}' is only partly in {cache}: {snapshot.name} lacks config.json or the weights. "
            f"To fetch the rest, run: {command}"
        )
    return snapshot
