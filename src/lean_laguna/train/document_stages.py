"""The stages for a target of one's own: its answers to prompts, and a drafter trained on them.

What could be refused is refused before weights are read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from lean_laguna.core.errors import DataError
from lean_laguna.core.files import atomic_write_text, sha256_file, sole_writer
from lean_laguna.core.model_config import LagunaConfig
from lean_laguna.core.provenance import checkpoint_hash
from lean_laguna.engine.llm import LLM
from lean_laguna.models.chat_template import ChatTemplate
from lean_laguna.models.checkpoint import load_laguna
from lean_laguna.models.dspark import DSparkDrafter
from lean_laguna.models.tokenizer import Tokenizer
from lean_laguna.train.calibration import calibrate_documents
from lean_laguna.train.conversations import read_conversations
from lean_laguna.train.curves import write_curves
from lean_laguna.train.documents import Document, last_answer, pack, read_documents
from lean_laguna.train.drafter import CURVES, DEFAULT_COMPILE, LOG, train_drafter
from lean_laguna.train.drafter_eval import said_on
from lean_laguna.train.drafter_start import check_start
from lean_laguna.train.features import open_cache
from lean_laguna.train.given_answers import write_given
from lean_laguna.train.loop import Echo, RunLog
from lean_laguna.train.processes import join
from lean_laguna.train.recipe import DrafterRecipe, load_recipe
from lean_laguna.train.responses import ResponseOptions, begin_responses, write_responses
from lean_laguna.train.run_state import open_run
from lean_laguna.train.stages import StageOptions
from lean_laguna.train.text_source import PackedSource

HELD_OUT = "held_out.jsonl"


def run_responses(
    prompts: Path,
    target_folder: Path,
    out: Path,
    options: ResponseOptions,
    *,
    device: str,
    drafter: str | None,
    is_given: bool,
    report: Callable[[str], None],
    echo: Echo = lambda kind, values: None,
) -> dict[str, float]:
    """Have the target answer prompts, or take the answers that the file gives.

    Args:
        prompts: JSONL file of conversations.
        target_folder: The target's checkpoint.
        out: JSONL file of documents.
        options: How the target answers.
        device: ``auto``, ``cpu`` or ``cuda``.
        drafter: A drafter to make it faster; the answers are the same.
        is_given: Take the file's own answers instead: off the target's distribution, and said so.
        report: Receives lines.
        echo: Receives how far the answers are.

    Raises:
        ConfigError: Another process is writing the same file, or as ``begin_responses``.
        DataError: The prompts are unusable, or as ``begin_responses``.
    """
    conversations = read_conversations(prompts)
    if is_given:
        report("answers are taken as given: a drafter learns most from what its target would write itself")
        template, tokenizer = ChatTemplate.from_dir(target_folder), Tokenizer.from_dir(target_folder)
        counts = write_given(conversations, template, tokenizer, out, options, target_folder)
        return {name: float(count) for name, count in counts.items()}
    for conversation in conversations:
        conversation.question()
    out.parent.mkdir(parents=True, exist_ok=True)
    with sole_writer(out):
        begun = begin_responses(out, prompts, options, target_folder)
        llm = LLM(
            str(target_folder), speculative_config={"model": drafter} if drafter else None, device=device
        )
        counts = write_responses(llm, conversations, out, options, begun, report=report, echo=echo)
    return {name: float(count) for name, count in counts.items()}


def run_documents(
    recipe: Path, target_folder: Path, documents: Path, options: StageOptions, *, features: Path | None
) -> dict[str, float]:
    """Train a drafter on documents that its target wrote.

    Args:
        recipe: The drafter's recipe.
        target_folder: The target's checkpoint.
        documents: From :func:`run_responses`, or of the same form.
        options: Folders and limits.
        features: Folder for the target's states of all rows; None computes them as they are needed.

    Returns:
        The final evaluation's figures.
    """
    loaded = load_recipe(DrafterRecipe, recipe)
    config = LagunaConfig.from_file(target_folder)
    drafter_config = check_start(loaded, config, str(recipe))
    found = read_documents(
        documents,
        vocab_size=config.vocab_size,
        max_length=min(loaded.length, config.max_position_embeddings),
        min_supervised=loaded.min_supervised,
        tokenizer_sha256=sha256_file(target_folder / "tokenizer.json"),
    )
    kept, held_out = split_documents(found, loaded)
    packed = pack(kept, loaded.length)
    provenance = {"target_sha256": checkpoint_hash(target_folder), "data_sha256": sha256_file(documents)}
    open_run(options.work, {"recipe": asdict(loaded), **provenance}, options.resume)
    rows = min(loaded.batch_rows, len(packed.tokens))
    steps = options.steps
    if steps is None and options.seconds is None:
        steps = max(1, math.ceil(loaded.epochs * len(packed.tokens) / rows / loaded.accumulate))
    options.report(
        f"{len(kept):,} documents in {len(packed.tokens):,} rows of {loaded.length:,}, "
        f"{len(held_out):,} held out, {int(packed.written.sum()):,} supervised tokens"
        + ("" if steps is None else f"; {steps:,} steps")
    )
    target = load_laguna(target_folder, dtype=torch.float32, device=options.device).requires_grad_(False)
    held_out = [said_on(document, target, loaded.num_eval_draft_tokens) for document in held_out]
    cache = None
    if features is not None:
        taps = drafter_config.target_layer_ids
        sha256, processes = provenance["target_sha256"], join(options.device)
        cache = open_cache(features, packed, target, taps, sha256, options.report, processes)
    drafter, figures = train_drafter(
        replace(loaded, batch_rows=rows),
        target=target,
        text=PackedSource(packed, options.device, cache),
        held_out=held_out,
        work=options.work,
        out=options.out,
        provenance=provenance,
        seconds=options.training_seconds(),
        steps=steps,
        compile_mode=options.compile_mode or DEFAULT_COMPILE,
        echo=options.echo,
        where=str(recipe),
    )
    if join(options.device).is_first:
        write_prompts(held_out, Tokenizer.from_dir(target_folder), options.out / HELD_OUT)
    has_confidence = isinstance(drafter, DSparkDrafter) and drafter.confidence_weight is not None
    if has_confidence and join(options.device).is_first:
        assert isinstance(drafter, DSparkDrafter)
        errors = calibrate_documents(drafter, target, held_out, options.out, provenance)
        log = RunLog(options.out / LOG, options.echo)
        log.write("calibration", **errors)
        write_curves(log.path, options.out / CURVES, f"{options.out.name}: training")
        figures |= errors
    return figures


def write_prompts(documents: Sequence[Document], tokenizer: Tokenizer, path: Path) -> None:
    """Write what stands before the documents' last answers as prompts to measure on.

    Args:
        documents: Held out. Left out are those whose text would be other tokens, read again.
        tokenizer: The target's.
        path: JSONL file with ``id`` and ``prompt`` on a line.
    """
    lines = []
    for document in documents:
        ids = document.tokens[: last_answer(document)[0]].tolist()
        text = tokenizer.decode(ids, skip_special_tokens=False)
        if tokenizer.encode(text) == ids:
            lines.append(json.dumps({"id": document.id, "prompt": text}) + "\n")
    atomic_write_text(path, "".join(lines))


def split_documents(
    documents: list[Document], recipe: DrafterRecipe
) -> tuple[list[Document], list[Document]]:
    """Hold out a share of the documents, two at least, spread evenly."""
    if len(documents) < 4:
        raise DataError(
            f"{len(documents)} documents are too few to train on and to hold two out; 4 are needed"
        )
    count = max(2, round(recipe.held_out_share * len(documents)))
    if count == len(documents):
        raise DataError(
            f"'held_out_share' is {recipe.held_out_share}: all {count} documents are held out, and none is "
            "left to train on"
        )
    chosen = {i * len(documents) // count for i in range(count)}
    return (
        [document for i, document in enumerate(documents) if i not in chosen],
        [document for i, document in enumerate(documents) if i in chosen],
    )
