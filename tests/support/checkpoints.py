"""The tiny target and a random drafter for it as checkpoint folders, for whatever starts from files."""

from __future__ import annotations

import json
from pathlib import Path

from lean_laguna.models.checkpoint import save_laguna
from lean_laguna.models.drafter_checkpoint import save_drafter
from support.drafters import laguna_json, random_drafter
from support.engines import VOCAB, tiny_config, tiny_target
from support.templates import SOURCES
from support.tokenizers import write_tokenizer


def write_tiny_target(folder: Path) -> Path:
    """Write a whole target checkpoint: weights, config, tokenizer, chat template, generation config."""
    write_tokenizer(folder, VOCAB)
    save_laguna(tiny_target(), tiny_config(), folder)
    (folder / "chat_template.jinja").write_text(SOURCES["later"], encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "〈|EOS|〉"}), encoding="utf-8")
    return folder


def write_tiny_drafter(folder: Path) -> Path:
    """Write a random DFlash drafter for the tiny target, with a block of 16."""
    config = laguna_json(
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        num_target_layers=4,
        block_size=16,
        dflash_config={"target_layer_ids": [0, 2, 3], "mask_token_id": 5, "causal": True},
    )
    save_drafter(random_drafter(config), folder)
    return folder
