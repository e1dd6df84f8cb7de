"""Argument parsing with help that fits a screen and errors that name the nearest flag.

Help is written by hand, since generated help lists forty flags over three screens; a test holds it against
the flags that the parser really has.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from lean_laguna.core.errors import ConfigError, nearest
from lean_laguna.core.files import parse_json


class Parser(argparse.ArgumentParser):
    """One command's parser: strict, without abbreviations, and silent: mistakes are raised, not printed."""

    def __init__(self, prog: str, help_text: str):
        super().__init__(prog=prog, allow_abbrev=False, add_help=False)
        self.help_text = help_text.strip("\n")
        self.add_argument("-h", "--help", action="store_true")

    def format_help(self) -> str:
        """Return the text written by hand."""
        return self.help_text + "\n"

    def error(self, message: str) -> NoReturn:
        """Raise instead of exiting.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(f"{message} (see: {self.prog} --help)")

    def parse_strictly(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse ``argv``; every word must have a meaning.

        Raises:
            ConfigError: An unknown flag, named with the nearest known one, a missing or wrong value, or a
                word too many.
        """
        args, rest = self.parse_known_args(list(argv))
        if args.help:
            return args
        for word in rest:
            if word.startswith("-") and word != "-":
                flag = word.partition("=")[0]
                close = nearest(flag, self.option_strings())
                hint = close if close.startswith("; did") else ""
                raise ConfigError(f"unknown option '{flag}'{hint} (see: {self.prog} --help)")
        if rest:
            raise ConfigError(
                f"unexpected argument {rest[0]!r}; put text with spaces in quotes (see: {self.prog} --help)"
            )
        return args

    def option_strings(self) -> list[str]:
        """Return every long flag."""
        return [name for action in self._actions for name in action.option_strings if name.startswith("--")]


def one_of(*accepted: str) -> Callable[[str], str]:
    """Return an argparse type that takes one of the given words."""

    def convert(text: str) -> str:
        if text not in accepted:
            raise argparse.ArgumentTypeError(f"must be one of {', '.join(accepted)}, found {text!r}")
        return text

    return convert


def whole(minimum: int, maximum: int | None = None) -> Callable[[str], int]:
    """Return an argparse type that takes a whole number in a range."""

    def convert(text: str) -> int:
        bounds = f"a whole number from {minimum}" + (f" to {maximum}" if maximum is not None else "")
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {bounds}, found {text!r}") from None
        if value < minimum or (maximum is not None and value > maximum):
            raise argparse.ArgumentTypeError(f"must be {bounds}, found {text!r}")
        return value

    return convert


def whole_list(minimum: int, maximum: int | None = None) -> Callable[[str], list[int]]:
    """Return an argparse type that takes whole numbers separated by commas, without repetition."""
    one = whole(minimum, maximum)

    def convert(text: str) -> list[int]:
        return list(dict.fromkeys(one(part.strip()) for part in text.split(",")))

    return convert


def draft_length(text: str) -> int | str:
    """Take a draft length: a whole number from 0, or ``auto``."""
    if text == "auto":
        return text
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"must be a whole number from 0, or auto, found {text!r}")
    return value


def json_object(text: str) -> dict[str, Any]:
    """Take a JSON object."""
    try:
        value = parse_json(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a JSON object ({error}), found {text!r}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, found {text!r}")
    return value


def token_bias(text: str) -> tuple[int, float]:
    """Take ``ID=BIAS``."""
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be ID=BIAS such as 42=-5, found {text!r}") from None
