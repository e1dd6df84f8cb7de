"""``lean-laguna train``: a corpus with its tokenizer, a target and a drafter, each from a recipe."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lean_laguna.cli.parser import Parser, one_of, whole
from lean_laguna.core.errors import ConfigError, DataError, nearest

if TYPE_CHECKING:
    from lean_laguna.cli.terminal import Terminal
    from lean_laguna.train.stages import StageOptions

DEFAULT_SECONDS, GENERATE_SECONDS = 540.0, 120.0
RUNS = Path("runs/nano")
COMMON = {"recipe", "data", "device"}
TRAINING = COMMON | {"out", "work", "budget", "steps", "resume", "compile"}
ANSWERING = ("prompts", "thinking", "temperature", "max_tokens", "seed", "given")
# What each stage takes, and the defaults that are its own.
STAGES: dict[str, set[str]] = {
    "corpus": {"recipe", "out", "wheels", "no_fetch"},
    "target": TRAINING,
    "drafter": TRAINING | {"target", "generate_budget", "documents", "features"},
    "responses": {"out", "device", "target", "drafter", *ANSWERING},
    "evaluate": COMMON | {"target", "drafter", "sequences"},
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "corpus": {"recipe": "nano/corpus", "out": RUNS / "data", "wheels": RUNS / "wheels"},
    "target": {"recipe": "nano/target", "out": RUNS / "target"},
    "drafter": {"recipe": "nano/dflash", "out": RUNS / "dflash", "target": str(RUNS / "target")},
    "responses": {"target": "nano", "out": Path("runs/responses.jsonl")},
    "evaluate": {"recipe": "nano/dflash", "target": "nano", "drafter": "nano-dflash"},
}
LEGEND = """\
  tau_chain: mean acceptance length as served; acc_K: drafts K that are right, whatever came before;
  ece: calibration error of confidences"""
HELP = """\
usage: lean-laguna train corpus|target|responses|drafter|evaluate [options]

Train a model pair from recipes. The same command after a kill goes on where it was.

  corpus     fetch, clean and encode the text; learn the tokenizer from it
  target     pretrain the target on it
  responses  have the target answer the prompts of a JSONL file (UltraChat, ShareGPT, plain)
  drafter    train a DFlash or DSpark drafter on what the target writes, or on --documents
  evaluate   measure a pair on held-out text: bits per character, acceptance, ceilings

  --recipe NAME|FILE        recipes/NAME.toml of the checkout, or a file (nano/STAGE, nano/dflash)
  --data DIR, --out DIR     encoded corpus (runs/nano/data); what is made (beside it)
  --resume auto|yes|no      go on where a state lies; insist on one; start anew (auto); --work DIR
  --budget S | --steps N    seconds for the whole command (540), or optimiser steps in all
  --target M, --drafter M   checkpoint folder or name (runs/nano/target; evaluate: nano pair)
  --generate-budget S       drafter: of the budget, at most so long for the target's text (120)
  --documents FILE          drafter: train on these responses; --features DIR: states kept
  --prompts FILE            responses: conversations; --given takes their answers as they are;
                            --thinking on|off, --temperature T, --max-tokens N, --seed N
  --sequences N             evaluate: so many held-out sequences; corpus: --wheels DIR, --no-fetch
  --device auto|cpu|cuda    where to train; --compile auto|on|off (target: auto; drafter: off)
  --json                    one line of JSON last, and nothing else on standard output

example: lean-laguna train target --recipe tiny/target --steps 50 --out runs/tiny/target
"""


def build_parser() -> Parser:
    """Return the command's parser."""
    parser = Parser("lean-laguna train", HELP)
    parser.add_argument("stage", nargs="?")
    parser.add_argument("--recipe")
    for name in ("--data", "--out", "--work", "--wheels"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--target")
    parser.add_argument("--drafter")
    parser.add_argument("--resume", type=one_of("auto", "yes", "no"))
    parser.add_argument("--budget", type=_seconds)
    parser.add_argument("--steps", type=whole(1))
    parser.add_argument("--generate-budget", type=_seconds)
    parser.add_argument("--sequences", type=whole(1))
    parser.add_argument("--no-fetch", action="store_true", default=None)
    for name in ("--documents", "--features", "--prompts"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--given", action="store_true", default=None)
    parser.add_argument("--thinking", type=one_of("on", "off"))
    parser.add_argument("--temperature", type=_temperature)
    parser.add_argument("--max-tokens", type=whole(1))
    parser.add_argument("--seed", type=whole(0))
    parser.add_argument("--device", type=one_of("auto", "cpu", "cuda"))
    parser.add_argument("--compile", type=one_of("auto", "on", "off"))
    parser.add_argument("--json", action="store_true")
    return parser


def run(args: argparse.Namespace) -> int:
    """Run one stage; returns the exit status.

    Raises:
        LeanLagunaError: A mistake in the call, the recipe or the data.
    """
    started = time.monotonic()
    _check(args)
    from lean_laguna.cli.terminal import Terminal
    from lean_laguna.train.recipe_files import find_recipe

    for name, value in DEFAULTS[args.stage].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.recipe = find_recipe(args.recipe) if args.recipe else None
    if args.stage not in ("corpus", "responses") and args.documents is None:
        args.data = RUNS / "data" if args.data is None else args.data
        if not args.data.is_dir():
            raise DataError(f"--data {args.data}: no such folder; make it with: lean-laguna train corpus")
    terminal = Terminal(is_json=args.json)
    stages = {
        "corpus": _corpus,
        "target": _target,
        "responses": _responses,
        "drafter": _drafter,
        "evaluate": _evaluate,
    }
    stage = stages[args.stage]
    figures = stage(args, started, terminal)
    if os.environ.get("RANK", "0") == "0":  # under torchrun, once
        _report(args, figures, started, terminal)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse an unknown stage, options of another stage, and two kinds of budget."""
    if args.stage not in STAGES:
        hint = (
            f" found '{args.stage}'{nearest(args.stage, STAGES)}" if args.stage else f" {', '.join(STAGES)}"
        )
        if args.stage == "tokenizer":
            hint = " the tokenizer is learnt by: lean-laguna train corpus"
        raise ConfigError(f"train what?{hint} (see: lean-laguna train --help)")
    for name in sorted(set().union(*STAGES.values()) - STAGES[args.stage]):
        if getattr(args, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            owners = ", ".join(stage for stage, names in STAGES.items() if name in names)
            raise ConfigError(f"{flag} means nothing to 'train {args.stage}'; it belongs to: {owners}")
    if args.stage == "responses" and args.prompts is None:
        raise ConfigError("train responses needs --prompts FILE, a JSONL file of conversations")
    if args.documents is None and args.features is not None:
        raise ConfigError("--features keeps the target's states of --documents; give those, too")
    if args.budget is not None and args.steps is not None:
        raise ConfigError("--budget and --steps were both given; training ends by one of them")


def _corpus(args: argparse.Namespace, started: float, terminal: Terminal) -> dict[str, float]:
    from lean_laguna.train.stages import run_corpus

    fetch = not args.no_fetch
    return run_corpus(args.recipe, wheels=args.wheels, out=args.out, fetch=fetch, report=terminal.note)


def _target(args: argparse.Namespace, started: float, terminal: Terminal) -> dict[str, float]:
    from lean_laguna.cli.training_progress import TrainingProgress
    from lean_laguna.train.stages import run_target

    with TrainingProgress(terminal) as progress:
        return run_target(args.recipe, _options(args, started, terminal, progress.show))


def _drafter(args: argparse.Namespace, started: float, terminal: Terminal) -> dict[str, float]:
    from lean_laguna.models.catalog import resolve_model

    if args.target == DEFAULTS["drafter"]["target"] and not Path(args.target).is_dir():
        raise DataError(
            f"--target {args.target}: no such folder; name the target, such as --target nano, or make that "
            "one with: lean-laguna train target"
        )
    target = resolve_model(args.target)
    from lean_laguna.cli.training_progress import TrainingProgress
    from lean_laguna.train.document_stages import run_documents
    from lean_laguna.train.stages import run_drafter

    if args.documents is not None:
        with TrainingProgress(terminal) as progress:
            options = _options(args, started, terminal, progress.show)
            return run_documents(args.recipe, target, args.documents, options, features=args.features)
    generate = GENERATE_SECONDS if args.generate_budget is None else args.generate_budget
    with TrainingProgress(terminal) as progress:
        options = _options(args, started, terminal, progress.show)
        return run_drafter(args.recipe, target, options, generate_seconds=generate)


def _responses(args: argparse.Namespace, started: float, terminal: Terminal) -> dict[str, float]:
    from lean_laguna.cli.training_progress import TrainingProgress
    from lean_laguna.models.catalog import resolve_model
    from lean_laguna.train.document_stages import run_responses
    from lean_laguna.train.responses import ResponseOptions

    names = ("temperature", "max_tokens", "seed")
    chosen = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    thinking = None if args.thinking is None else args.thinking == "on"
    with TrainingProgress(terminal) as progress:
        return run_responses(
            args.prompts,
            resolve_model(args.target),
            args.out,
            ResponseOptions(thinking=thinking, **chosen),
            device=args.device or "auto",
            drafter=None if args.drafter == "none" else args.drafter,
            is_given=bool(args.given),
            report=terminal.note,
            echo=progress.show,
        )


def _evaluate(args: argparse.Namespace, started: float, terminal: Terminal) -> dict[str, float]:
    from lean_laguna.models.catalog import resolve_model

    target = resolve_model(args.target)
    drafter = None if args.drafter == "none" else resolve_model(args.drafter)
    from lean_laguna.engine.loading import resolve_device
    from lean_laguna.train.stages import run_evaluation

    return run_evaluation(
        target,
        drafter,
        args.data,
        args.recipe,
        device=resolve_device(args.device or "auto"),
        num_sequences=args.sequences,
        report=terminal.note,
    )


def _options(args: argparse.Namespace, started: float, terminal: Terminal, echo: Any) -> StageOptions:
    """Return what both trainers take: folders, limits, and how to compile."""
    import torch

    from lean_laguna.engine.loading import resolve_device
    from lean_laguna.train.processes import own_device
    from lean_laguna.train.stages import StageOptions

    torch.set_float32_matmul_precision("high")
    budget = DEFAULT_SECONDS if args.budget is None else args.budget
    beside = args.out if args.out.name.strip(".") else args.out.resolve()
    work = Path(f"{beside}-work") if args.work is None else args.work
    for flag, folder in (("--out", args.out), ("--work", work)):
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{flag} {folder}: is a file; give a folder, or a name for a new one")
    return StageOptions(
        data=args.data,
        out=args.out,
        work=work,
        device=own_device(resolve_device(args.device or "auto")),
        started=started,
        # Documents are read for the recipe's epochs where nothing else is asked for.
        seconds=None if args.steps is not None or (args.documents and args.budget is None) else budget,
        steps=args.steps,
        resume=args.resume or "auto",
        compile_mode=args.compile,
        report=terminal.note,
        echo=echo,
    )


def _report(args: argparse.Namespace, figures: dict[str, float], started: float, terminal: Terminal) -> None:
    seconds = round(time.monotonic() - started, 1)
    for name, value in figures.items():
        terminal.report(f"  {name:32} {value:14,.4f}".rstrip("0").rstrip("."))
    if any(name.endswith("tau_chain") for name in figures):
        terminal.report(LEGEND)
    made = None if args.out is None else str(args.out)
    terminal.report(f"{args.stage}: {seconds} s" + (f", written to {made}" if made else ""))
    terminal.json_line(
        {
            "stage": args.stage,
            "recipe": args.recipe and str(args.recipe),
            "out": made,
            "seconds": seconds,
            **figures,
        }
    )


def _temperature(text: str) -> float:
    """Take a temperature, 0 or more."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, found {text!r}")
    return value


def _seconds(text: str) -> float:
    """Take a time in seconds, more than 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, found {text!r}")
    return value
