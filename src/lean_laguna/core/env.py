"""The environment variables that change what the package does, and the folders they name.

Ours carry one prefix, ``LEAN_LAGUNA_``; the others are Hugging Face's and the desktop's, read the way their
owners read them.
"""

from __future__ import annotations

import os
from pathlib import Path

PREFIX = "LEAN_LAGUNA_"


def cache_dir() -> Path:
    """Return our cache folder: ``LEAN_LAGUNA_CACHE``, else ``lean-laguna`` in the user's cache folder."""
    given = os.environ.get(f"{PREFIX}CACHE")
    return Path(given).expanduser() if given else _user_cache() / "lean-laguna"


def hf_hub_cache() -> Path:
    """Return the folder where Hugging Face keeps downloaded repositories.

    Source: huggingface_hub.constants: HF_HUB_CACHE, else HF_HOME/hub, else the user's cache folder.
    """
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if given := os.environ.get(name):
            return Path(os.path.expandvars(given)).expanduser()
    home = os.environ.get("HF_HOME")
    base = Path(os.path.expandvars(home)).expanduser() if home else _user_cache() / "huggingface"
    return base / "hub"


def _user_cache() -> Path:
    given = os.environ.get("XDG_CACHE_HOME")
    return Path(given).expanduser() if given else Path.home() / ".cache"
