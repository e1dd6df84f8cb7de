"""``lean-laguna convert drafter``: a drafter from one checkpoint format to another, bit for bit."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from lean_laguna.cli.parser import Parser, one_of
from lean_laguna.core.drafter_writing import FORMATS
from lean_laguna.core.errors import ConfigError

HELP = """\
usage: lean-laguna convert drafter SOURCE DESTINATION --format NAME [options]

Write a DFlash or DSpark drafter in another format. Every weight keeps its bits, and is read back
and compared. A format that cannot hold what the drafter computes (an output gate, a norm per tapped
layer, a vocabulary of its own, ...) is refused, and the reason named.

  SOURCE                    a folder, nano-dflash, or a downloaded repository, in any of the formats
  DESTINATION               a folder that does not exist yet
  --format NAME             laguna (Poolside's), z-lab, speculators, or deepspec (DSpark)
  --target NAME             also check that it is a drafter for this target, and record it; z-lab's
                            format needs it where SOURCE does not say the target's depth
  --json                    one line of JSON last, and nothing else on standard output

example: lean-laguna convert drafter poolside/Laguna-XS.2-speculator.dflash xs2-zlab --format z-lab
"""


def build_parser() -> Parser:
    """Return the command's parser."""
    parser = Parser("lean-laguna convert drafter", HELP)
    parser.add_argument("source", nargs="?")
    parser.add_argument("destination", nargs="?", type=Path)
    parser.add_argument("--format", type=one_of(*FORMATS))
    parser.add_argument("--target")
    parser.add_argument("--json", action="store_true")
    return parser


def run(args: argparse.Namespace) -> int:
    """Convert a drafter.

    Raises:
        LeanLagunaError: A mistake in the call or its input.
    """
    if args.source is None or args.destination is None or args.format is None:
        raise ConfigError("convert drafter needs a source, a destination folder and --format")
    from lean_laguna.cli.terminal import Terminal
    from lean_laguna.convert.drafter import convert_drafter
    from lean_laguna.core.model_config import LagunaConfig
    from lean_laguna.models.catalog import resolve_model
    from lean_laguna.plan.units import count

    target = LagunaConfig.from_file(resolve_model(args.target)) if args.target else None
    source = resolve_model(args.source)
    done = convert_drafter(source, args.destination, args.format, target=target, target_name=args.target)
    terminal = Terminal(is_json=args.json)
    terminal.report(
        f"{args.destination}: {done.before} → {done.after}, {count(done.num_weights)} weights, bit for bit"
    )
    if done.left_out:
        terminal.report(f"left out, as the target has them: {', '.join(done.left_out)}")
    terminal.json_line(
        {
            "kind": "convert drafter",
            "source": str(source),
            "destination": str(args.destination),
            **dataclasses.asdict(done),
        }
    )
    return 0
