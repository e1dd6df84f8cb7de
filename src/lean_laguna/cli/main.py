"""``lean-laguna``: finds the command, runs it, and turns mistakes into one line and an exit status.

Commands are imported when they are called for, so that help and mistakes answer at once.
"""

from __future__ import annotations

import codecs
import contextlib
import importlib
import io
import os
import sys
from collections.abc import Sequence

from lean_laguna.cli.interrupts import heard_interrupts
from lean_laguna.core.errors import ConfigError, LeanLagunaError, nearest

PROG = "lean-laguna"
COMMANDS = ("generate", "serve", "bench", "sweep", "parity", "train", "inspect", "plan", "convert")
OK, USER_ERROR, INTERRUPTED, BROKEN_PIPE = 0, 2, 130, 141
OTHER_SIGNS = {"·": "-", "–": "-", "×": "x", "→": "->", "≤": "<=", "…": "..."}
OTHER_SIGNS |= dict.fromkeys("▏▎▍", " ") | dict.fromkeys("▌▋▊▉█", "#")
_LONGEST_LINE = 2000
HELP = """\
usage: lean-laguna COMMAND [options]

Laguna code models with speculative decoding that never changes the output.

  generate   continue a prompt, streaming; --show-drafts shows speculation at work
  serve      the model over HTTP, for OpenAI's and vLLM's clients
  bench      speed with a drafter against without, and proof that the text is the same
  sweep      speed against draft length, and the best length on this machine
  parity     a verdict per prompt: identical, near-tie or mismatch
  train      train a tokenizer, a target or a drafter from a recipe
  inspect    what is quantised how, bytes per token, the ceiling in tok/s, what is missing
  plan       what fits on a card: weights, drafter, keys and values; the longest context
  convert    a checkpoint into another: quantised, another context, another drafter format

  lean-laguna COMMAND --help    options and an example
  lean-laguna --version

The default model, nano, comes with the package and runs offline on a CPU.
Exit status: 0 done, 1 a check failed, 2 a mistake in the call or its input, 130 interrupted.

example: lean-laguna generate 'def fib(n):' --show-drafts
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    _open_missing_streams()
    _take_any_text()
    try:
        with heard_interrupts(f"{PROG}: interrupted", INTERRUPTED):
            return _run(words)
    except LeanLagunaError as error:
        print(f"{PROG}: error: {_one_line(str(error))}", file=sys.stderr)
        return USER_ERROR
    except KeyboardInterrupt:
        print(f"\n{PROG}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _give_up_output()  # whoever read it has enough
        return BROKEN_PIPE
    except OSError as error:  # a full disk, a folder that vanished: the machine's, not a fault of ours
        place = f"{error.filename}: " if error.filename is not None else ""
        print(f"{PROG}: error: {_one_line(place + (error.strerror or str(error)))}", file=sys.stderr)
        _give_up_output()
        return USER_ERROR


def _open_missing_streams() -> None:
    """Stand in for standard streams that the caller has closed, which Python gives as None."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 (open as long as the process)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115


def _take_any_text() -> None:
    """Let streams of an older encoding put another sign where they lack one; Python would give up."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
            codecs.register_error(PROG, _another_sign)
            stream.reconfigure(errors=PROG)


def _another_sign(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return OTHER_SIGNS.get(error.object[error.start], "?"), error.start + 1


def _give_up_output() -> None:
    """Send what is left to nowhere, or Python complains once more when it flushes at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return OK if words else USER_ERROR
    name, *rest = words
    if name == "--version":
        from lean_laguna import __version__

        print(f"{PROG} {__version__}")
        return OK
    if name not in COMMANDS:
        if name.startswith("-"):
            raise ConfigError(f"unknown option '{name}'; the command comes first (see: {PROG} --help)")
        raise ConfigError(f"unknown command '{name}'{nearest(name, COMMANDS)} (see: {PROG} --help)")
    command = importlib.import_module(f"lean_laguna.cli.{name}")
    parser = command.build_parser()
    args = parser.parse_strictly(rest)
    if args.help:
        print(parser.format_help(), end="")
        return OK
    status: int = command.run(args)
    return status


def _one_line(message: str) -> str:
    """Return a message as a line that a terminal can show: it may repeat what a file or a caller made up."""
    line = " ".join(message.split())
    line = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)
    half = (_LONGEST_LINE - 5) // 2
    return line if len(line) <= _LONGEST_LINE else f"{line[:half]} ... {line[-half:]}"


if __name__ == "__main__":
    sys.exit(main())
