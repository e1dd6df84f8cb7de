"""The nano models end to end, one stage a command: ``corpus``, ``target``, ``drafter``.

    python -m lean_laguna.train.nano_run target --data runs/nano/data --out runs/nano/target --budget 540

Each stage fits a time budget, can be killed and started again, prints a table and, last, one JSON line.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from lean_laguna.core.errors import LeanLagunaError
from lean_laguna.models.checkpoint import load_laguna
from lean_laguna.train.dataset import load_tokens
from lean_laguna.train.drafter import evaluate, train_drafter
from lean_laguna.train.metrics import distinct_ngram_share
from lean_laguna.train.prepare import prepare_corpus
from lean_laguna.train.recipe import (
    CorpusRecipe,
    DrafterRecipe,
    SelfgenRecipe,
    TargetRecipe,
    TokenizerRecipe,
    load_recipe,
)
from lean_laguna.train.selfgen import Generated, generate_held_out, generate_text
from lean_laguna.train.target import train_target

FINAL_EVALUATION_S = 30.0  # kept back from the budget for validation, samples and files


def main(argv: list[str] | None = None) -> int:
    """Run one stage; returns the exit status."""
    started = time.monotonic()
    arguments = _parser().parse_args(argv)
    torch.set_float32_matmul_precision("high")
    try:
        figures = {"corpus": _corpus, "target": _target, "drafter": _drafter}[arguments.stage](
            arguments, started
        )
    except LeanLagunaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"stage": arguments.stage, "seconds": round(time.monotonic() - started, 1), **figures}))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m lean_laguna.train.nano_run", description=__doc__)
    stages = parser.add_subparsers(dest="stage", required=True)
    corpus = stages.add_parser("corpus", help="fetch, clean and tokenise the corpus")
    corpus.add_argument("--recipes", type=Path, default=Path("recipes/nano"))
    corpus.add_argument("--wheels", type=Path, default=Path("runs/nano/wheels"))
    corpus.add_argument("--out", type=Path, default=Path("runs/nano/data"))
    corpus.add_argument("--no-fetch", action="store_true", help="use the wheels that are there")
    for name, recipe in (("target", "recipes/nano/target.toml"), ("drafter", "recipes/nano/dflash.toml")):
        stage = stages.add_parser(name, help=f"train the {name}")
        stage.add_argument("--recipe", type=Path, default=Path(recipe))
        stage.add_argument("--data", type=Path, default=Path("runs/nano/data"))
        stage.add_argument(
            "--work", type=Path, default=Path(f"runs/nano/work-{name}"), help="resumable state"
        )
        stage.add_argument("--out", type=Path, required=True, help="checkpoint and log")
        stage.add_argument("--budget", type=float, help="seconds for the whole command")
        stage.add_argument("--steps", type=int, help="optimiser steps instead of a time budget")
        stage.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        stage.add_argument("--compile", choices=("auto", "on", "off"), default="auto")
        if name == "drafter":
            stage.add_argument("--target", type=Path, default=Path("runs/nano/target"))
            stage.add_argument(
                "--generate-s", type=float, default=120.0, help="at most so long for self-generation"
            )
    return parser


def _corpus(arguments: argparse.Namespace, started: float) -> dict[str, Any]:
    recipes = arguments.recipes
    prepare_corpus(
        load_recipe(CorpusRecipe, recipes / "corpus.toml"),
        load_recipe(TokenizerRecipe, recipes / "tokenizer.toml"),
        wheels=arguments.wheels,
        out=arguments.out,
        fetch=not arguments.no_fetch,
    )
    return {}


def _target(arguments: argparse.Namespace, started: float) -> dict[str, Any]:
    recipe = load_recipe(TargetRecipe, arguments.recipe)
    model, figures = train_target(
        recipe,
        data=arguments.data,
        work=arguments.work,
        out=arguments.out,
        device=torch.device(arguments.device),
        seconds=_training_seconds(arguments, started),
        steps=arguments.steps,
        compile_mode=arguments.compile,
        where=str(arguments.recipe),
    )
    selfgen = SelfgenRecipe(eval_sequences=64 if arguments.device != "cpu" else 2, length=320)
    texts = _held_out(model, arguments.data, selfgen)
    for kind, text in texts.items():
        figures[f"{kind}_distinct_8gram"] = distinct_ngram_share(text.tokens[:, selfgen.max_prefix :])
        _show_samples(text, arguments.data, kind)
    _table("target", figures)
    return figures


def _drafter(arguments: argparse.Namespace, started: float) -> dict[str, Any]:
    recipe = load_recipe(DrafterRecipe, arguments.recipe)
    device = torch.device(arguments.device)
    target = load_laguna(arguments.target, dtype=torch.float32, device=device)
    target.requires_grad_(False)
    text = generate_text(
        target, load_tokens(arguments.data, "train"), recipe.selfgen,
        deadline=started + arguments.generate_s, report=lambda line: print(line, file=sys.stderr, flush=True),
    )  # fmt: skip
    held_out = _held_out(target, arguments.data, recipe.selfgen)
    for kind, sample in held_out.items():
        _show_samples(sample, arguments.data, kind, count=1)
    drafter, figures = train_drafter(
        recipe,
        target=target,
        text=text,
        held_out=held_out,
        work=arguments.work,
        out=arguments.out,
        provenance={"target_sha256": _hash_weights(arguments.target)},
        seconds=_training_seconds(arguments, started),
        steps=arguments.steps,
        compile_mode=arguments.compile,
        where=str(arguments.recipe),
    )
    figures |= _longer_blocks(drafter, target, held_out)
    _table("drafter", figures)
    return figures


def _longer_blocks(drafter: Any, target: Any, held_out: dict[str, Generated]) -> dict[str, float]:
    """Mean acceptance length at other draft lengths, and the ceiling of an argmax drafter on sampled text."""
    found = {}
    for drafts in (3, 15):
        for kind, text in held_out.items():
            result = evaluate(drafter, target, text, drafts)
            found[f"{kind}_tau_chain_at_{drafts}"] = result["tau_chain"]
    return found


def _held_out(target: Any, data: Path, recipe: SelfgenRecipe) -> dict[str, Generated]:
    stream = load_tokens(data, "val")
    return {
        "greedy": generate_held_out(target, stream, recipe, 0.0),
        "sampled": generate_held_out(target, stream, recipe, recipe.temperature),
    }


def _training_seconds(arguments: argparse.Namespace, started: float) -> float | None:
    if arguments.steps is not None:
        return None
    budget = arguments.budget if arguments.budget is not None else 540.0
    return max(1.0, budget - FINAL_EVALUATION_S - (time.monotonic() - started))


def _show_samples(text: Generated, data: Path, kind: str, count: int = 2) -> None:
    tokenizer = Tokenizer.from_file(str(data / "tokenizer" / "tokenizer.json"))
    for row in text.tokens[:count]:
        prefix = int(text.prefix_lengths[0])
        written = tokenizer.decode(row[prefix:].tolist(), skip_special_tokens=False)
        print(
            f"--- {kind}: {tokenizer.decode(row[:prefix].tolist(), skip_special_tokens=False)!r} ->\n{written}"
        )


def _hash_weights(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _table(name: str, figures: dict[str, float]) -> None:
    print(f"\n{name}")
    for key, value in figures.items():
        print(f"  {key:28} {value:12.4f}")


if __name__ == "__main__":
    raise SystemExit(main())
