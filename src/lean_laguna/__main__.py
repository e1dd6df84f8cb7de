"""The command's first moments, and ``python -m lean_laguna``, as ``torchrun -m lean_laguna`` needs it.

Python answers an interrupt during an import with a traceback, and the command line takes some tens of
milliseconds to be imported: until it hears interrupts itself, they are heard here.
"""

import os
import signal
import sys

_LAST_WORDS = b"\nlean-laguna: interrupted\n"
_STATUS = 130


def main() -> int:
    """Import the command line, run it on the process's arguments, and return the exit status."""
    is_usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_usual:
        signal.signal(signal.SIGINT, _end)
    from lean_laguna.cli.main import main as run

    if is_usual:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run(sys.argv[1:])


def _end(number: int, frame: object) -> None:
    """End the process where it stands: nothing has been begun."""
    try:
        os.write(2, _LAST_WORDS)
    finally:
        os._exit(_STATUS)


if __name__ == "__main__":
    sys.exit(main())
