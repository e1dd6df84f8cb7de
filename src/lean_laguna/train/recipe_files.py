"""Recipes by name: ``nano/target`` stands for ``recipes/nano/target.toml`` of the project's source tree."""

from __future__ import annotations

from pathlib import Path

from lean_laguna.core.errors import ConfigError, nearest


def recipe_folders() -> list[Path]:
    """Return the folders that names are looked up in: of this checkout, and of the current folder."""
    checkout = Path(__file__).resolve().parents[3]  # lean_laguna/train/.. of a src layout
    candidates = dict.fromkeys([checkout / "recipes", Path.cwd() / "recipes"])
    return [folder for folder in candidates if folder.is_dir()]


def find_recipe(name: str) -> Path:
    """Return the file of a recipe.

    Args:
        name: ``FOLDER/NAME`` of a recipe of the source tree, or the path of a TOML file.

    Raises:
        ConfigError: There is no such recipe; names those that there are, or where they would be.
    """
    if name.endswith(".toml"):
        if not Path(name).is_file():
            raise ConfigError(f"recipe '{name}': no such file")
        return Path(name)
    folders = recipe_folders()
    for folder in folders:
        if (folder / f"{name}.toml").is_file():
            return folder / f"{name}.toml"
    if not folders:
        raise ConfigError(
            f"recipe '{name}' is looked up in recipes/ of the project's source tree, which an installed "
            "package does not carry; run this in a checkout of the project, or give the path of a .toml file"
        )
    known = {
        file.relative_to(folder).with_suffix("").as_posix()
        for folder in folders
        for file in folder.rglob("*.toml")
    }
    raise ConfigError(f"unknown recipe '{name}'{nearest(name, known)} (or give the path of a .toml file)")
