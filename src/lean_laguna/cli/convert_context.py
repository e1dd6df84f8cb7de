"""``lean-laguna convert context``: a Laguna-S checkpoint from 256K to 1M positions and back."""

from __future__ import annotations

import argparse
from pathlib import Path

from lean_laguna.cli.parser import Parser, one_of
from lean_laguna.core.errors import ConfigError

HELP = """\
usage: lean-laguna convert context SOURCE [DESTINATION] --to 1m|256k [options]

Give a Laguna-S-2.1 checkpoint its other context, by the constants that Poolside publishes for it:
three values of config.json, checked before and after. Weights stay as they are; the new folder's
other files share their bytes with the source's where the disk can.

  SOURCE                    a folder, or a downloaded repository
  DESTINATION               a folder that does not exist yet
  --to 1m|256k              the context to set: 1,048,576 or 262,144 positions
  --in-place                change SOURCE's config.json instead of making a folder
  --json                    one line of JSON last, and nothing else on standard output

example: lean-laguna convert context Laguna-S-2.1-NVFP4 Laguna-S-2.1-NVFP4-1m --to 1m
"""


def build_parser() -> Parser:
    """Return the command's parser."""
    parser = Parser("lean-laguna convert context", HELP)
    parser.add_argument("source", nargs="?")
    parser.add_argument("destination", nargs="?", type=Path)
    parser.add_argument("--to", type=one_of("1m", "256k"))
    parser.add_argument("--in-place", action="store_true")
    parser.add_argument("--json", action="store_true")
    return parser


def run(args: argparse.Namespace) -> int:
    """Change the context.

    Raises:
        LeanLagunaError: A mistake in the call or its input.
    """
    if args.source is None or args.to is None:
        raise ConfigError("convert context needs a source folder and --to 1m or --to 256k")
    if (args.destination is None) != args.in_place:
        raise ConfigError("convert context needs a destination folder, or --in-place; one of the two")
    from lean_laguna.cli.terminal import Terminal
    from lean_laguna.convert.context import SETTINGS, convert_context
    from lean_laguna.models.catalog import resolve_model

    folder = resolve_model(args.source)
    change = convert_context(folder, args.destination, args.to)
    before, after = SETTINGS[change.before], SETTINGS[change.after]
    terminal = Terminal(is_json=args.json)
    values = {
        "max_position_embeddings": (before.max_position_embeddings, after.max_position_embeddings),
        "rope_parameters.full_attention.factor": (before.factor, after.factor),
        "rope_parameters.full_attention.attention_factor": (before.attention_factor, after.attention_factor),
    }
    terminal.report(f"{args.destination or folder}: context {change.before} → {change.after}")
    for name, (old, new) in values.items():
        terminal.report(f"  {name:<48} {old:>18} → {new}")
    terminal.json_line(
        {
            "kind": "convert context",
            "source": str(folder),
            "destination": str(args.destination or folder),
            "before": change.before,
            "after": change.after,
            "changed": values,
        }
    )
    return 0
