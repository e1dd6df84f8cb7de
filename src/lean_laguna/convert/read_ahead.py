"""Asks the disk for what comes next in a file, so that it reads while the cores encode."""

from __future__ import annotations

import os
import threading
from pathlib import Path

_CHUNK, _AHEAD = 16 << 20, 64 << 20


class ReadAhead:
    """One file that several threads read roughly in order; does nothing where the system cannot."""

    def __init__(self, file: Path):
        """Open a file and ask for its beginning."""
        self._handle = os.open(file, os.O_RDONLY)
        self._size, self._asked, self._lock = os.fstat(self._handle).st_size, 0, threading.Lock()
        self.note(0)

    def note(self, place: int) -> None:
        """Ask for what follows a place that is about to be read."""
        if not hasattr(os, "posix_fadvise"):
            return
        with self._lock:
            end = min(place + _AHEAD, self._size)
            while self._asked < end:
                os.posix_fadvise(self._handle, self._asked, _CHUNK, os.POSIX_FADV_WILLNEED)
                self._asked += _CHUNK

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)
