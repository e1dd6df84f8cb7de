"""Every error a user can meet.

    LeanLagunaError
    ├── ConfigError            a configuration key, flag or value is wrong
    ├── CheckpointError        a file of a checkpoint is missing, damaged or of another kind
    ├── RequestError           a request cannot be served as asked
    ├── DataError              training or evaluation data is unusable
    ├── BackendError           a server that is asked over HTTP fails, or cannot be reached
    ├── WorkerError            a process that this one has started was killed
    └── MissingDependencyError an optional package is not installed

Each message says what was found, where, and what would be right. The command line prints the message
alone and exits with status 2; a traceback means a fault of ours.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LeanLagunaError(Exception):
    """Base of every error that is the caller's to mend."""


class ConfigError(LeanLagunaError, ValueError):
    """A configuration key, flag or value is wrong."""


class CheckpointError(LeanLagunaError):
    """A checkpoint file is missing, damaged or of another kind."""


class RequestError(LeanLagunaError, ValueError):
    """A request cannot be served as asked.

    Attributes:
        param: The request field at fault, if one is.
        code: A machine-readable reason such as ``context_length_exceeded``.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
        self.code = code


class DataError(LeanLagunaError):
    """Training or evaluation data is unusable."""


class BackendError(LeanLagunaError):
    """A server that is asked over HTTP fails, answers wrongly, or cannot be reached.

    Attributes:
        status: The HTTP status that says so, if one does.
    """

    def __init__(self, message: str, *, status: int | None = None):
        super().__init__(message)
        self.status = status


class WorkerError(LeanLagunaError):
    """A process that this one has started has ended before its work did: killed, or out of memory."""


class MissingDependencyError(LeanLagunaError, ImportError):
    """An optional package is not installed."""

    def __init__(self, package: str, needed_for: str, extra: str | None = None):
        how = f"pip install 'lean-laguna[{extra}]'" if extra else f"pip install {package}"
        super().__init__(f"{needed_for} needs the package '{package}', which is not installed; run: {how}")


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a hint that names the known word closest to ``word``.

    Args:
        word: What was found.
        known: The accepted words.

    Returns:
        ``"; did you mean 'x'?"`` or, where nothing is close, ``"; known: a, b, c"``.
    """
    words = sorted(known)
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; known: {', '.join(words)}"


def reject_unknown(given: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raise if a key of ``given`` is not among ``known``.

    Raises:
        ConfigError: Names the first unknown key, where it stands, and the nearest known key.
    """
    accepted = list(known)
    for key in given:
        if key not in accepted:
            raise ConfigError(f"{where}: unknown key '{key}'{nearest(str(key), accepted)}")
