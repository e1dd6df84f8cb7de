"""``lean-laguna train``: a tokenizer, a target or a drafter from a recipe."""

from __future__ import annotations

import argparse
from pathlib import Path

from lean_laguna.cli.parser import Parser, one_of, whole
from lean_laguna.core.errors import ConfigError

STAGES = ("tokenizer", "target", "drafter")
RECIPES = {"tokenizer": "tokenizer.toml", "target": "target.toml", "drafter": "dflash.toml"}
HELP = """\
usage: lean-laguna train tokenizer|target|drafter [options]

Train one of the three from a recipe. Killed and started again, it goes on where it was.

  tokenizer                 fetch, clean and encode the corpus, train the tokenizer
  target                    pretrain the target on the encoded corpus
  drafter                   let the target write text, and train a DFlash drafter on it

  --recipes DIR             folder with the recipes (recipes/nano)
  --data DIR                encoded corpus and tokenizer (runs/nano/data)
  --target DIR              drafter: the target's checkpoint (runs/nano/target)
  --out DIR                 checkpoint and log (runs/nano/target, runs/nano/drafter)
  --work DIR                state to resume from (OUT-work)
  --wheels DIR, --no-fetch  tokenizer: where the sources lie, and not to fetch what is missing
  --seconds S, --steps N    time for the whole command (540), or a number of steps instead
  --generate-seconds S      drafter: at most so long for the target to write text (120)
  --device auto|cpu|cuda    where to train
  --compile auto|on|off     whether to compile
  --json                    one line of JSON last, and nothing else on standard output

example: lean-laguna train target --recipes recipes/nano --steps 3 --device cpu --compile off
"""


def build_parser() -> Parser:
    """Return the command's parser."""
    parser = Parser("lean-laguna train", HELP)
    parser.add_argument("stage", nargs="?")
    for name in ("recipes", "data", "target", "out", "work", "wheels"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--no-fetch", action="store_true")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--steps", type=whole(1))  # type: ignore[arg-type]
    parser.add_argument("--generate-seconds", type=float, default=120.0)
    parser.add_argument("--device", type=one_of("auto", "cpu", "cuda"), default="auto")  # type: ignore[arg-type]
    parser.add_argument("--compile", type=one_of("auto", "on", "off"), default="auto")  # type: ignore[arg-type]
    parser.add_argument("--json", action="store_true")
    return parser


def run(args: argparse.Namespace) -> int:
    """Train; returns the exit status.

    Raises:
        LeanLagunaError: A mistake in the call, the recipe or the data.
    """
    raise ConfigError("train is being connected")
