"""Files written whole or not at all, and files identified by what they hold.

Nothing here knows what a checkpoint or a result is; ``provenance`` does.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from lean_laguna.core.errors import ConfigError

HASH_CHUNK_BYTES = 1 << 20
_ESCAPED_HALF, _ESCAPED_HALF_BYTES = re.compile(r"\\u[dD][89a-fA-F]"), re.compile(rb"\\u[dD][89a-fA-F]")
_HELD_FOLDERS: dict[str, int] = {}
_DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


@contextlib.contextmanager
def atomic_writer(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a binary file that takes the place of ``path`` only when the block ends without an exception.

    The data is written beside ``path`` and renamed over it, so a reader sees the old file or the new one, and
    an interrupt leaves neither a half-written file nor a temporary one. A link stays one: what it leads to is
    replaced. A device or a pipe is written to as it is.

    Raises:
        ConfigError: The folder is missing or cannot be written to, or the disk is full.
    """
    target = Path(path)
    if target.is_dir():
        raise ConfigError(f"cannot write {target}: it is a folder; give a file name")
    if _is_special(target):
        try:
            with target.open("wb") as device:
                yield device
        except OSError as error:
            raise ConfigError(f"cannot write {target}: {error.strerror or error}") from None
        return
    place = _place(target)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{place.name}.", suffix=".tmp", dir=place.parent)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror or error}") from None
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())  # mkstemp makes files for the owner alone; results are for everyone
        os.replace(name, place)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(name)
        fault = error if isinstance(error, OSError) else error.__context__  # torch.save hides it in its own
        if isinstance(fault, OSError) and fault.errno in _DISK_FAULTS:
            raise ConfigError(f"cannot write {target}: {fault.strerror}") from None
        raise


@contextlib.contextmanager
def sole_writer(target: Path) -> Iterator[None]:
    """Keep other processes of this package from writing to the same file or folder until the block ends.

    A killed process holds nothing, though the empty file ``.NAME.lock`` may stay beside its target.

    Raises:
        ConfigError: Another process is writing there, or nobody can.
    """
    place = Path(os.path.abspath(target))  # "." has no name
    lock = place.parent / f".{place.name}.lock"
    try:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror or error}") from None
    try:
        _lock(handle, target)
        if not lock.exists() or not os.path.samestat(os.fstat(handle), lock.stat()):
            raise _busy(target)  # who held it has just removed it
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
    finally:
        os.close(handle)


def hold_folder(folder: Path) -> None:
    """Keep other processes out of a folder for as long as this process lives.

    Raises:
        ConfigError: Another process holds it.
    """
    place = os.path.realpath(folder)
    if place in _HELD_FOLDERS:
        return
    handle = os.open(place, os.O_RDONLY)
    try:
        _lock(handle, folder)
    except ConfigError:
        os.close(handle)
        raise
    _HELD_FOLDERS[place] = handle


def _lock(handle: int, target: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _busy(target) from None
    except OSError:  # a file system without locks
        return


def _busy(target: Path) -> ConfigError:
    return ConfigError(f"{target}: another process is writing there; wait for it, or give another place")


def remove_unfinished(folder: Path) -> None:
    """Remove what killed ``atomic_writer`` blocks left in a folder that one program alone writes to."""
    for left in folder.glob(".*.tmp"):
        left.unlink(missing_ok=True)


def atomic_write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write ``data`` to ``path``, whole or not at all.

    Raises:
        ConfigError: As for ``atomic_writer``.
    """
    with atomic_writer(path) as file:
        file.write(data)


def atomic_write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write ``text`` as UTF-8 to ``path``, whole or not at all.

    Raises:
        ConfigError: As for ``atomic_writer``.
    """
    atomic_write_bytes(path, text.encode("utf-8"))


def atomic_write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write ``value`` as indented JSON to ``path``, whole or not at all; infinities and NaN are refused.

    Raises:
        ConfigError: As for ``atomic_writer``.
        ValueError: The value holds a number that JSON cannot.
    """
    atomic_write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def is_there(path: Path) -> bool:
    """Return whether a path is taken, if only by a link that leads nowhere, as to a file never downloaded."""
    return os.path.lexists(path)


class RepeatedNameError(ValueError):
    """A name stands twice in one JSON object."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RepeatedNameError(f"'{twice:.60}' stands twice in one object")
    return found


def parse_json(text: str | bytes) -> Any:
    """Parse JSON that others wrote; every way in which it can be unusable is a ``ValueError``.

    Args:
        text: The JSON.

    Raises:
        ValueError: It is not JSON, not UTF-8, nested too deeply, or holds a name twice, a number too long
            to be one, or half a character, which no file or tokenizer could take.
    """
    try:
        value = json.loads(text, object_pairs_hook=_once)
        if _ESCAPED_HALF.search(text) if isinstance(text, str) else _ESCAPED_HALF_BYTES.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(f"it holds half a character, {half!r} without its other half") from None
    return value


def require_writable(path: str | os.PathLike[str]) -> None:
    """Refuse an output path that could not be written, before the work that it is for.

    Raises:
        ConfigError: The path is a folder, its folder is missing, or it cannot be written to.
    """
    target = Path(path)
    try:
        if target.is_dir():
            raise ConfigError(f"cannot write {target}: it is a folder; give a file name")
        if _is_special(target):
            return
        place = _place(target)
        if not place.parent.is_dir():
            raise ConfigError(f"cannot write {target}: the folder {place.parent} does not exist")
        # Tried, not asked: permissions say nothing about a read-only or a special file system.
        with tempfile.NamedTemporaryFile(prefix=f".{place.name}.", suffix=".tmp", dir=place.parent):
            pass
    except PermissionError:
        raise ConfigError(f"cannot write {target}: no permission to write in {place.parent}") from None
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror or error}") from None


def sha256_file(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file's bytes as 64 hex digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def sha256_text(text: str) -> str:
    """Return the SHA-256 of a text's UTF-8 bytes as 64 hex digits."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _is_special(path: Path) -> bool:
    """Return whether a path is a device or a pipe, whose place no file must take."""
    return path.exists() and not path.is_file()


def _place(path: Path) -> Path:
    """Return the file that a path, maybe a link, leads to."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
