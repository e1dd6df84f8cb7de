"""``lean-laguna train``: a tokenizer, a target or a drafter from a recipe."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lean_laguna.cli.parser import Parser, one_of, whole
from lean_laguna.core.errors import ConfigError, DataError, nearest
from lean_laguna.core.files import atomic_write_bytes

if TYPE_CHECKING:
    import torch

    from lean_laguna.cli.terminal import Terminal

STAGES = ("tokenizer", "target", "drafter")
DEFAULT_SECONDS = 540.0
RUNS = Path("runs/nano")
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
  --work DIR                state to resume from (OUT with -work)
  --wheels DIR, --no-fetch  tokenizer: where the sources lie, and not to fetch what is missing
  --seconds S, --steps N    time for the whole command (540), or optimiser steps in all instead
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
    parser.add_argument("--recipes", type=Path, default=Path("recipes/nano"))
    parser.add_argument("--data", type=Path, default=RUNS / "data")
    parser.add_argument("--target", type=Path, default=RUNS / "target")
    parser.add_argument("--wheels", type=Path, default=RUNS / "wheels")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", type=Path)
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
    started = time.monotonic()
    if args.stage not in STAGES:
        hint = nearest(args.stage, STAGES) if args.stage else f"; one of {', '.join(STAGES)}"
        raise ConfigError(f"train what? found {args.stage!r}{hint} (see: lean-laguna train --help)")
    if args.seconds is not None and args.steps is not None:
        raise ConfigError("--seconds and --steps were both given; training ends by one of them")
    if args.stage != "tokenizer" and not args.data.is_dir():
        raise DataError(f"--data {args.data}: no such folder; make it with: lean-laguna train tokenizer")
    from lean_laguna.cli.terminal import Terminal

    terminal = Terminal(is_json=args.json)
    stages = {"tokenizer": _tokenizer, "target": _target, "drafter": _drafter}
    figures = stages[args.stage](args, started, terminal)
    for name, value in figures.items():
        terminal.report(f"  {name:28} {value:12.4f}")
    terminal.json_line({"stage": args.stage, "seconds": round(time.monotonic() - started, 1), **figures})
    return 0


def _tokenizer(args: argparse.Namespace, started: float, terminal: Terminal) -> dict[str, float]:
    from lean_laguna.train.prepare import prepare_corpus
    from lean_laguna.train.recipe import CorpusRecipe, TokenizerRecipe, load_recipe

    prepare_corpus(
        load_recipe(CorpusRecipe, args.recipes / "corpus.toml"),
        load_recipe(TokenizerRecipe, args.recipes / "tokenizer.toml"),
        wheels=args.wheels,
        out=args.data if args.out is None else args.out,
        fetch=not args.no_fetch,
        report=terminal.note,
    )
    return {}


def _target(args: argparse.Namespace, started: float, terminal: Terminal) -> dict[str, float]:
    from lean_laguna.train.recipe import TargetRecipe, load_recipe

    file = args.recipes / "target.toml"
    recipe = load_recipe(TargetRecipe, file)
    from lean_laguna.train.target import train_target

    out = RUNS / "target" if args.out is None else args.out
    _, figures = train_target(
        recipe, data=args.data, device=_device(args), **_common(args, started, out, file)
    )
    for tokenizer_file in sorted((args.data / "tokenizer").iterdir()):  # a target is whole with its tokenizer
        atomic_write_bytes(out / tokenizer_file.name, tokenizer_file.read_bytes())
    return figures


def _drafter(args: argparse.Namespace, started: float, terminal: Terminal) -> dict[str, float]:
    from lean_laguna.train.recipe import DrafterRecipe, load_recipe

    file = args.recipes / "dflash.toml"
    recipe = load_recipe(DrafterRecipe, file)
    import torch

    from lean_laguna.core.provenance import checkpoint_hash
    from lean_laguna.models.checkpoint import load_laguna
    from lean_laguna.train.dataset import load_tokens
    from lean_laguna.train.drafter import train_drafter
    from lean_laguna.train.selfgen import generate_held_out, generate_text

    target = load_laguna(args.target, dtype=torch.float32, device=_device(args))
    target.requires_grad_(False)
    deadline = started + args.generate_seconds
    stream = load_tokens(args.data, "train")
    text = generate_text(target, stream, recipe.selfgen, deadline=deadline, report=terminal.note)
    held_out = {
        name: generate_held_out(target, load_tokens(args.data, "val"), recipe.selfgen, temperature)
        for name, temperature in (("greedy", 0.0), ("sampled", recipe.selfgen.temperature))
    }
    out = RUNS / "drafter" if args.out is None else args.out
    _, figures = train_drafter(
        recipe,
        target=target,
        text=text,
        held_out=held_out,
        provenance={"target_sha256": checkpoint_hash(args.target)},
        **_common(args, started, out, file),
    )
    return figures


def _common(args: argparse.Namespace, started: float, out: Path, recipe: Path) -> dict[str, Any]:
    """Return what both trainers take: folders, limits, and how to compile."""
    seconds = None
    if args.steps is None:
        whole_command = DEFAULT_SECONDS if args.seconds is None else args.seconds
        seconds = max(1.0, whole_command - (time.monotonic() - started))
    return {
        "work": out.with_name(f"{out.name}-work") if args.work is None else args.work,
        "out": out,
        "seconds": seconds,
        "steps": args.steps,
        "compile_mode": args.compile,
        "where": str(recipe),
    }


def _device(args: argparse.Namespace) -> torch.device:
    from lean_laguna.engine.loading import resolve_device

    return resolve_device(args.device)
