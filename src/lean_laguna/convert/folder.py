"""A checkpoint folder that appears whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from lean_laguna.core.errors import ConfigError
from lean_laguna.core.files import sole_writer


@contextlib.contextmanager
def whole_folder(destination: Path) -> Iterator[Path]:
    """Yield a folder to write into; it takes the destination's name when the block ends without an exception.

    Args:
        destination: A folder that does not exist yet, or an empty one.

    Raises:
        ConfigError: The destination exists, its parent does not, or it cannot be written.
    """
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise ConfigError(
            f"{destination}: exists already; expected a folder that does not exist yet, or an empty one"
        )
    if not destination.name or not destination.parent.is_dir():
        raise ConfigError(f"cannot write {destination}: the folder {destination.parent} does not exist")
    partial = destination.with_name(f".{destination.name}.partial")
    with sole_writer(destination):
        try:
            shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
            partial.mkdir()
            yield partial
            if destination.is_dir():
                destination.rmdir()
            partial.rename(destination)
        except OSError as error:
            raise ConfigError(f"cannot write {destination}: {error.strerror or error}") from None
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def link_or_copy(file: Path, copy: Path) -> None:
    """Give a file a second name; where the disk cannot, copy it.

    Checkpoint files are replaced as a whole and never written into, so both names may share their bytes.
    """
    try:
        os.link(file.resolve(), copy)
    except OSError:
        shutil.copyfile(file, copy)
