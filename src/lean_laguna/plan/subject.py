"""What is inspected or planned for: a checkpoint folder, a config.json alone, or a published shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lean_laguna.core.drafter_config import DFlashConfig, is_drafter_config
from lean_laguna.core.errors import CheckpointError
from lean_laguna.core.model_config import LagunaConfig, read_config_json
from lean_laguna.models.catalog import resolve_model
from lean_laguna.models.shapes import SHAPES, drafter_shape, laguna_shape
from lean_laguna.plan.files import CheckpointFiles, missing_tensors, read_files
from lean_laguna.plan.inventory import (
    Inventory,
    drafter_from_config,
    drafter_from_headers,
    scheme_lookup,
    target_from_config,
    target_from_headers,
)
from lean_laguna.plan.schemes import TITLES, stored_as
from lean_laguna.quant.config import read_quantization


@dataclass(frozen=True)
class Target:
    """A target whose weights need not be at hand.

    Attributes:
        name: As the user gave it, with the scheme of a shape.
        config: Its architecture.
        inventory: Its weights.
        files: Its folder, None without one.
        known_from: ``headers``, ``config`` or ``shape``.
    """

    name: str
    config: LagunaConfig
    inventory: Inventory
    files: CheckpointFiles | None
    known_from: str


@dataclass(frozen=True)
class Drafter:
    """A drafter whose weights need not be at hand."""

    name: str
    config: DFlashConfig
    inventory: Inventory


def target_of_shape(name: str, scheme: str) -> Target:
    """Return a published shape, stored in a named way.

    Raises:
        ConfigError: No such shape or scheme.
    """
    config = laguna_shape(name)
    return Target(f"{name}, {TITLES.get(scheme, scheme)}", config, stored_as(config, scheme), None, "shape")


def target_of(name: str) -> Target:
    """Read a target from a folder, a config.json, or a name that stands for a folder.

    Raises:
        CheckpointError: Nothing of that name is here, or it is a drafter.
        ConfigError: Its config is wrong.
    """
    file = Path(name).expanduser()
    if file.is_file() and file.suffix == ".json":
        given = read_config_json(file)
        _refuse_drafter(given, str(file))
        config, inventory = target_from_config(given, str(file))
        return Target(name, config, inventory, None, "config")
    folder = resolve_model(name)
    given = read_config_json(folder)
    _refuse_drafter(given, str(folder))
    files = read_files(folder)
    if not files.header or files.unread:
        # What its headers do not say, its config does.
        config, inventory = target_from_config(given, str(folder / "config.json"))
        return Target(name, config, inventory, files, "config")
    scheme_of = scheme_lookup(read_quantization(given, str(folder / "config.json")))
    config, inventory = target_from_headers(folder, files.header, scheme_of)
    missing = missing_tensors(config, scheme_of, files.header)
    files = CheckpointFiles(
        files.folder, files.shards, files.header, (*files.problems, *missing, *inventory.problems[:3])
    )
    return Target(name, config, inventory, files, "headers")


def drafter_of(name: str) -> Drafter:
    """Read a drafter from a published shape's name, a folder, or a name that stands for one.

    Raises:
        CheckpointError: Nothing of that name is here, it is not whole, or it is a target.
        ConfigError: Its config is wrong.
    """
    if name in SHAPES:
        config = drafter_shape(name)
        return Drafter(f"{name} DFlash, BF16", config, drafter_from_config(config))
    folder = resolve_model(name)
    given, where = read_config_json(folder), str(folder / "config.json")
    config = DFlashConfig.from_dict(given, where)
    scheme_of = scheme_lookup(read_quantization(given, where))
    files = read_files(folder)
    if not files.shards:
        return Drafter(name, config, drafter_from_config(config))
    if files.problems:
        raise CheckpointError(f"{folder}: the drafter is not whole: {files.problems[0]}")
    return Drafter(name, config, drafter_from_headers(files.header, scheme_of))


def _refuse_drafter(given: Mapping[str, Any], where: str) -> None:
    if is_drafter_config(given):
        raise CheckpointError(f"{where}: this is a drafter; give the target, and this one with --drafter")
