"""The stages of a model pair, each from a recipe to files and figures: corpus, target, drafter, evaluation.

A stage may be killed and called again: it goes on where it was. Nothing here prints; who calls passes in what
receives lines and events.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from lean_laguna.core.errors import ConfigError, DataError
from lean_laguna.core.files import atomic_write_bytes
from lean_laguna.core.model_config import LagunaConfig
from lean_laguna.core.provenance import checkpoint_hash
from lean_laguna.models.checkpoint import load_laguna
from lean_laguna.models.drafter_checkpoint import load_drafter
from lean_laguna.models.laguna import LagunaForCausalLM
from lean_laguna.train.compiling import CompileMode
from lean_laguna.train.dataset import load_meta, load_tokens
from lean_laguna.train.drafter import DEFAULT_COMPILE, train_drafter
from lean_laguna.train.drafter_eval import evaluate_further, evaluate_kinds
from lean_laguna.train.drafter_start import check_start
from lean_laguna.train.generated import Generated, load_generated, save_generated
from lean_laguna.train.loop import Echo, print_event
from lean_laguna.train.metrics import distinct_ngram_share
from lean_laguna.train.prepare import prepare_corpus
from lean_laguna.train.recipe import CorpusRecipe, DrafterRecipe, SelfgenRecipe, TargetRecipe, load_recipe
from lean_laguna.train.run_state import TEXT, ResumeMode, open_run
from lean_laguna.train.selfgen import generate_held_out, generate_text
from lean_laguna.train.target import score_target, train_target

FINAL_EVALUATION_S = 30.0  # kept back from the budget for the last evaluation and for files
CPU_ROWS = 4  # sequences at once in an evaluation without a GPU
SAMPLE_LINES = 12
Report = Callable[[str], None]


@dataclass(frozen=True)
class StageOptions:
    """Where a training stage reads and writes, and when it ends.

    Attributes:
        data: Folder of the encoded corpus.
        out: Checkpoint and log.
        work: State to resume from.
        device: Training device.
        started: ``time.monotonic()`` from which the budget counts.
        seconds: Budget of the whole stage, start-up and last evaluation included; or
        steps: Optimiser steps in all.
        resume: Whether to go on from a state in ``work``.
        compile_mode: None for what is safe for the stage.
        report: Receives lines.
        echo: Receives the log's events.
    """

    data: Path
    out: Path
    work: Path
    device: torch.device
    started: float
    seconds: float | None = None
    steps: int | None = None
    resume: ResumeMode = "auto"
    compile_mode: CompileMode | None = None
    report: Report = print
    echo: Echo = print_event

    def training_seconds(self) -> float | None:
        """Return what is left of the budget for training, or None where steps are counted."""
        if self.seconds is None:
            return None
        return max(1.0, self.seconds - FINAL_EVALUATION_S - (time.monotonic() - self.started))


def run_corpus(recipe: Path, *, wheels: Path, out: Path, fetch: bool, report: Report) -> dict[str, float]:
    """Fetch, clean and encode the corpus and train its tokenizer; returns counts."""
    corpus = load_recipe(CorpusRecipe, recipe)
    return prepare_corpus(corpus, wheels=wheels, out=out, fetch=fetch, report=report)


def run_target(recipe: Path, options: StageOptions) -> dict[str, float]:
    """Pretrain a target and leave a whole checkpoint: weights, config, tokenizer, manifest, log.

    Returns:
        The final validation's figures, and the distinct-8-gram share of what the target writes.
    """
    loaded = load_recipe(TargetRecipe, recipe)
    tokenizer = options.data / "tokenizer"  # a target is whole with its tokenizer
    if not (tokenizer / "tokenizer.json").is_file():
        raise DataError(f"'{tokenizer}' has no tokenizer.json; make it with: lean-laguna train corpus")
    identity = {"recipe": asdict(loaded), "data": load_meta(options.data)["sha256"]}
    open_run(options.work, identity, options.resume)
    model, figures = train_target(
        loaded,
        data=options.data,
        work=options.work,
        out=options.out,
        device=options.device,
        seconds=options.training_seconds(),
        steps=options.steps,
        compile_mode=options.compile_mode or "auto",
        echo=options.echo,
        where=str(recipe),
    )
    for file in (*sorted(tokenizer.iterdir()), options.data / "data_manifest.json"):
        if file.is_file():
            atomic_write_bytes(options.out / file.name, file.read_bytes())
    length = min(SelfgenRecipe.length, model.config.max_position_embeddings)
    selfgen = SelfgenRecipe(eval_sequences=2 if options.device.type == "cpu" else 64, length=length)
    for kind, text in held_out_text(model, options.data, selfgen).items():
        figures[f"{kind}_distinct_8gram"] = distinct_ngram_share(text.tokens[:, selfgen.max_prefix :])
        _report_sample(text, options.data, kind, options.report)
    return figures


def run_drafter(
    recipe: Path, target_folder: Path, options: StageOptions, *, generate_seconds: float
) -> dict[str, float]:
    """Let the target write text, and train a drafter on it.

    Args:
        recipe: The drafter's recipe.
        target_folder: The target's checkpoint.
        options: Folders and limits.
        generate_seconds: With a budget in seconds, at most so long for the text; what there is then is used.

    Returns:
        The final evaluation's figures, at other draft lengths too, with the ceiling.
    """
    loaded = load_recipe(DrafterRecipe, recipe)
    config = LagunaConfig.from_file(target_folder)
    check_start(loaded, config, str(recipe))
    _check_text(loaded, config, str(recipe))
    target = load_laguna(target_folder, dtype=torch.float32, device=options.device).requires_grad_(False)
    provenance = {"target_sha256": checkpoint_hash(target_folder)}
    meta = load_meta(options.data)
    open_run(options.work, {"recipe": asdict(loaded), "data": meta["sha256"], **provenance}, options.resume)
    text = _training_text(loaded.selfgen, target, options, generate_seconds)
    held_out = held_out_text(target, options.data, loaded.selfgen)
    for kind, sample in held_out.items():
        _report_sample(sample, options.data, kind, options.report)
    drafter, figures = train_drafter(
        loaded,
        target=target,
        text=text,
        held_out=held_out,
        work=options.work,
        out=options.out,
        provenance=provenance,
        seconds=options.training_seconds(),
        steps=options.steps,
        compile_mode=options.compile_mode or DEFAULT_COMPILE,
        echo=options.echo,
        where=str(recipe),
    )
    return figures | evaluate_further(
        drafter, target, held_out, loaded.num_eval_draft_tokens, _rows(options.device)
    )


def run_evaluation(
    target_folder: Path,
    drafter_folder: Path | None,
    data: Path,
    recipe: Path,
    *,
    device: torch.device,
    num_sequences: int | None,
    report: Report,
) -> dict[str, float]:
    """Measure a trained pair on held-out data, as the last step of training does.

    Args:
        target_folder: The target's checkpoint.
        drafter_folder: The drafter's, or None for the target alone.
        data: Folder of the encoded corpus.
        recipe: The drafter's recipe: lengths, temperature and number of the held-out sequences.
        device: Where.
        num_sequences: Held-out continuations of each kind and held-out rows, instead of the recipe's and of
            a million tokens.
        report: Receives lines.
    """
    loaded = load_recipe(DrafterRecipe, recipe)
    target = load_laguna(target_folder, dtype=torch.float32, device=device).requires_grad_(False)
    chars = torch.tensor(load_meta(data)["chars_per_token"], device=device)
    val = load_tokens(data, "val").to(device)
    length = min(target.config.max_position_embeddings, len(val) - 1)
    most = TargetRecipe.val_tokens if num_sequences is None else num_sequences * length
    figures = score_target(target, val, chars, length, _rows(device), most)
    report("target scored")
    if drafter_folder is None:
        return figures
    drafter = load_drafter(drafter_folder, target.config, dtype=torch.float32, device=device)
    selfgen = loaded.selfgen
    held_out = held_out_text(target, data, selfgen, num_sequences)
    report("held-out text written")
    for measure in (evaluate_kinds, evaluate_further):
        figures |= measure(drafter, target, held_out, loaded.num_eval_draft_tokens, _rows(device))
    return figures


def held_out_text(
    target: LagunaForCausalLM, data: Path, recipe: SelfgenRecipe, num_sequences: int | None = None
) -> dict[str, Generated]:
    """Let the target continue held-out prefixes, ``greedy`` and ``sampled`` at the recipe's temperature."""
    stream = load_tokens(data, "val")
    if num_sequences is not None:
        recipe = replace(recipe, eval_sequences=num_sequences)
    return {
        "greedy": generate_held_out(target, stream, recipe, 0.0),
        "sampled": generate_held_out(target, stream, recipe, recipe.temperature),
    }


def _check_text(recipe: DrafterRecipe, target: LagunaConfig, where: str) -> None:
    """Refuse text that the target's context does not hold, or too short to evaluate on."""
    text, limit = recipe.selfgen, target.max_position_embeddings
    if text.length > limit:
        raise ConfigError(
            f"{where}: 'selfgen': 'length' is {text.length}, and the target's context holds {limit} tokens"
        )
    if text.length - text.max_prefix <= recipe.num_eval_draft_tokens:
        raise ConfigError(
            f"{where}: 'selfgen': 'length' less 'max_prefix' is {text.length - text.max_prefix}; evaluation "
            f"with 'num_eval_draft_tokens' = {recipe.num_eval_draft_tokens} needs more tokens than that"
        )


def _training_text(
    recipe: SelfgenRecipe, target: LagunaForCausalLM, options: StageOptions, seconds: float
) -> Generated:
    """Read the text of an interrupted run, or have it written and keep it."""
    kept = options.work / TEXT
    if kept.exists():
        options.report(f"self-generated text taken from {kept}")
        return load_generated(kept, options.device)
    deadline = None if options.seconds is None else options.started + seconds
    stream = load_tokens(options.data, "train")
    text = generate_text(target, stream, recipe, deadline=deadline, report=options.report)
    save_generated(text, kept)
    return text


def _report_sample(text: Generated, data: Path, kind: str, report: Report) -> None:
    """Show how the first sequence goes on, a few lines of it."""
    tokenizer = Tokenizer.from_file(str(data / "tokenizer" / "tokenizer.json"))
    prefix = int(text.prefix_lengths[0])
    begin, rest = (
        tokenizer.decode(part.tolist(), skip_special_tokens=False)
        for part in (text.tokens[0, :prefix], text.tokens[0, prefix:])
    )
    lines = rest.splitlines()
    shown = "\n".join(lines[:SAMPLE_LINES] + ["..."] * (len(lines) > SAMPLE_LINES))
    report(f"--- {kind} text after {begin[-60:]!r}:\n{shown}")


def _rows(device: torch.device) -> int:
    return CPU_ROWS if device.type == "cpu" else 16
