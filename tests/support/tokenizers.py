"""A small byte-level BPE with Laguna's special tokens, trained in a moment on a few lines."""

from __future__ import annotations

import functools
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ("<unk>", "<pad>", "〈|EOS|〉")
ADDED_TOKENS = ("<think>", "</think>", "<assistant>", "</assistant>", "<tool_call>", "</tool_call>")
CORPUS = (
    "def add(a, b):\n    return a + b\n\nfor i in range(10):\n    print(i)\n",
    "The snowman says: ☃☃☃ and 日本語 and 😀😀 and Příliš žluťoučký.\n",
)


@functools.cache
def byte_level_json(vocab_size: int = 320) -> str:
    """Return the tokenizer.json of a byte-level BPE: 256 bytes, Laguna's special tokens, a few merges."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(ADDED_TOKENS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in ADDED_TOKENS])
    return str(tokenizer.to_str())


def write_tokenizer(folder: Path, vocab_size: int = 320) -> Path:
    """Write tokenizer.json into ``folder`` and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(byte_level_json(vocab_size), encoding="utf-8")
    return folder
