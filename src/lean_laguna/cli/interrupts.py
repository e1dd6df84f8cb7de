"""Ctrl-C that is heard while libraries are being loaded, too.

Packages that look for others swallow every exception of an import, the interrupt among them: it is then lost,
or comes back later as an error about a module loaded twice. Nothing has been begun at that moment, so the
process ends where it stands.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_IMPORTING = "<frozen importlib"


@contextlib.contextmanager
def heard_interrupts(message: str, status: int) -> Iterator[None]:
    """Have an interrupt during an import end the process; any other raises KeyboardInterrupt, as usual.

    Where interrupts are ignored or someone else's, they stay so.

    Args:
        message: The line for standard error.
        status: The process's exit status.
    """

    def handler(number: int, frame: FrameType | None) -> None:
        if not _is_importing(frame):
            raise KeyboardInterrupt
        with contextlib.suppress(OSError):
            os.write(2, f"\n{message}\n".encode())
        os._exit(status)

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is handler:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORTING):
            return True
        frame = frame.f_back
    return False
