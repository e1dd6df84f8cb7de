"""From a corpus recipe to the folder that a GPU machine needs: tokens, tokenizer, manifest, meta.json."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

from lean_laguna.core.errors import DataError
from lean_laguna.core.files import atomic_write_text
from lean_laguna.train.corpus import build_corpus, short_manifest, write_manifest
from lean_laguna.train.dataset import chat_documents, encode_documents, save_meta, save_tokens
from lean_laguna.train.recipe import CorpusRecipe
from lean_laguna.train.sources import fetch_wheels
from lean_laguna.train.tokenizer import save_tokenizer, train_bpe

MAX_POSITION_EMBEDDINGS = 2048
"""Of the nano target, for its tokenizer_config.json."""


def prepare_corpus(
    recipe: CorpusRecipe,
    *,
    wheels: Path,
    out: Path,
    fetch: bool = True,
    processes: int | None = None,
    report: Callable[[str], None] = print,
) -> dict[str, float]:
    """Fetch, read, clean, train the tokenizer, encode, and write everything under ``out``.

    The manifest that lists every file goes beside ``out``, as OUT-manifest.json: it is large, and only the
    short one travels with the tokens.

    Args:
        recipe: What to read, and the tokenizer.
        wheels: Folder of wheels.
        out: Folder to write.
        fetch: Download wheels that are missing.
        processes: Workers that parse files; None is one a core.
        report: Receives one line for each step.

    Returns:
        Counts of distributions, documents, characters and tokens.

    Raises:
        DataError: No text is left, or the decontamination data is missing.
    """
    out.mkdir(parents=True, exist_ok=True)
    if fetch:
        pinned = [*recipe.requirements, recipe.decontaminate_with]
        fetch_wheels(pinned, wheels, report)
    corpus = build_corpus(recipe, wheels, on_distribution=report, processes=processes)
    train, val = corpus.documents["train"], corpus.documents["val"]
    if not train or not val:
        raise DataError(
            f"'{wheels}' gave {len(train)} documents to train on and {len(val)} held out; both are needed "
            "(see the lines above for what was not fetched, not permitted or dropped)"
        )
    train_chars = sum(map(len, train))
    report(f"text: {train_chars:,} characters to train on, {sum(map(len, val)):,} held out")
    chat = chat_documents(corpus.chat, int(recipe.chat_share * train_chars), recipe.seed)

    tokenizer = train_bpe(_sample(train, recipe.tokenizer.sample_bytes), recipe.tokenizer.vocab_size)
    save_tokenizer(tokenizer, out / "tokenizer", MAX_POSITION_EMBEDDINGS)
    tokens = {"train": encode_documents(tokenizer, [*train, *chat]), "val": encode_documents(tokenizer, val)}
    if 0 < recipe.max_train_tokens < len(tokens["train"]):
        report(f"cut from {len(tokens['train']):,} to {recipe.max_train_tokens:,} training tokens")
        tokens["train"] = tokens["train"][-recipe.max_train_tokens :]
    corpus.manifest["chat_documents"] = len(chat)
    meta = {
        "tokens": {split: len(stream) for split, stream in tokens.items()},
        "characters": {"train": train_chars, "val": sum(map(len, val))},
        "sha256": {split: save_tokens(out, split, stream) for split, stream in tokens.items()},
        "manifest_sha256": write_manifest(corpus, out.with_name(f"{out.name}-manifest.json")),
    }
    short = json.dumps(short_manifest(corpus.manifest), indent=1, sort_keys=True)
    atomic_write_text(out / "data_manifest.json", short + "\n")
    save_meta(out, meta, tokenizer)
    return {
        "distributions": len(corpus.manifest["distributions"]),
        "train_documents": len(train) + len(chat),
        "val_documents": len(val),
        "train_tokens": len(tokens["train"]),
        "val_tokens": len(tokens["val"]),
        "chars_per_token": train_chars / len(tokens["train"]),
    }


def _sample(documents: list[str], max_chars: int) -> list[str]:
    """A random choice of documents, so that no large distribution rules the merges."""
    order = list(range(len(documents)))
    random.Random(0).shuffle(order)
    chosen: list[str] = []
    total = 0
    for index in order:
        if total >= max_chars:
            break
        chosen.append(documents[index])
        total += len(documents[index])
    return chosen
