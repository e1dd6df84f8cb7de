"""A draft-length profile on disk: what a controller learned, as one JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lean_laguna.core.errors import ConfigError
from lean_laguna.core.files import atomic_write_text, parse_json


def save_profile(profile: Mapping[str, Any], path: Path) -> None:
    """Write ``DraftLengthController.to_dict()``; the file is replaced whole or not at all."""
    atomic_write_text(path, json.dumps(profile, indent=1) + "\n")


def load_profile(path: Path) -> dict[str, Any]:
    """Read what `save_profile` wrote.

    Raises:
        ConfigError: There is no such file, or it holds no JSON object.
    """
    try:
        found = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"draft-length profile {path}: cannot be read ({error})") from None
    if not isinstance(found, dict):
        raise ConfigError(
            f"draft-length profile {path}: must hold a JSON object, found {type(found).__name__}"
        )
    return found
