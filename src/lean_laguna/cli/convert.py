"""``lean-laguna convert``: finds the conversion and runs it; each has a file of its own."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from typing import Any

from lean_laguna.cli.parser import Parser
from lean_laguna.core.errors import ConfigError, nearest

# The conversions and the modules of this package that hold them.
CONVERSIONS = {
    "quantize": "convert_quantize",
    "context": "convert_context",
    "drafter": "convert_drafter",
}
HELP = """\
usage: lean-laguna convert quantize|context|drafter SOURCE DESTINATION [options]

A checkpoint in, a checkpoint out; the source stays as it is.

  quantize   store weights in 4 or 8 bits: NVFP4, FP8, INT8, INT4
  context    256K to 1M positions and back, for Laguna-S
  drafter    from one drafter format to another, bit for bit

  lean-laguna convert NAME --help    options and an example

example: lean-laguna convert quantize nano nano-nvfp4 --scheme nvfp4 --modules experts+attention
"""


class ConvertParser(Parser):
    """Leaves the words after a conversion's name to that conversion's parser."""

    def __init__(self) -> None:
        super().__init__("lean-laguna convert", HELP)
        self._chosen: Parser | None = None

    def parse_strictly(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse the words of one conversion.

        Raises:
            ConfigError: There is no such conversion, or its words are wrong.
        """
        if not argv or argv[0].startswith("-"):
            args = super().parse_strictly(argv)
            if not args.help:
                raise ConfigError(f"convert what? known: {', '.join(CONVERSIONS)} (see: {self.prog} --help)")
            return args
        name = argv[0]
        if name not in CONVERSIONS:
            raise ConfigError(f"unknown conversion '{name}'{nearest(name, CONVERSIONS)}")
        self._chosen = _module(name).build_parser()
        args = self._chosen.parse_strictly(argv[1:])
        args.conversion = name
        return args

    def format_help(self) -> str:
        """Return the help of the chosen conversion, or of all."""
        return super().format_help() if self._chosen is None else self._chosen.format_help()


def build_parser() -> ConvertParser:
    """Return the command's parser."""
    return ConvertParser()


def run(args: argparse.Namespace) -> int:
    """Run the chosen conversion.

    Raises:
        LeanLagunaError: A mistake in the call or its input.
    """
    status: int = _module(args.conversion).run(args)
    return status


def _module(name: str) -> Any:
    return importlib.import_module(f"lean_laguna.cli.{CONVERSIONS[name]}")
