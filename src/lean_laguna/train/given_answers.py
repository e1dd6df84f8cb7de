"""Documents from conversations with given answers; the chat template says which tokens the assistant said."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from lean_laguna.core.errors import DataError
from lean_laguna.core.files import atomic_write_json, atomic_writer, sha256_file, sole_writer
from lean_laguna.core.provenance import checkpoint_hash
from lean_laguna.models.assistant_spans import tokens_with_mask
from lean_laguna.models.chat_template import ChatTemplate
from lean_laguna.models.tokenizer import Tokenizer
from lean_laguna.train.conversations import Conversation
from lean_laguna.train.responses import ResponseOptions


def write_given(
    conversations: Sequence[Conversation],
    template: ChatTemplate,
    tokenizer: Tokenizer,
    out: Path,
    options: ResponseOptions,
    target_folder: Path,
) -> dict[str, int]:
    """Write a document for each conversation, whole or not at all.

    Args:
        conversations: With answers.
        template: The target's.
        tokenizer: The target's.
        out: JSONL file of documents; ``OUT.meta.json`` beside it.
        options: Its ``thinking`` goes to the template.
        target_folder: The target's checkpoint.

    Returns:
        How many documents.

    Raises:
        DataError: A conversation without an answer, named.
    """
    switches: dict[str, Any] = {} if options.thinking is None else {"enable_thinking": options.thinking}
    lines = []
    for conversation in conversations:
        try:
            ids, mask = tokens_with_mask(template, tokenizer, conversation.messages, **switches)
        except DataError as error:
            raise DataError(f"conversation '{conversation.id}': {error}") from None
        document = {"id": conversation.id, "input_ids": ids, "loss_mask": [int(said) for said in mask]}
        lines.append(json.dumps(document) + "\n")
    out.parent.mkdir(parents=True, exist_ok=True)
    meta = {
        "target_sha256": checkpoint_hash(target_folder),
        "tokenizer_sha256": sha256_file(target_folder / "tokenizer.json"),
        "sampling": None,
        "options": asdict(options),
    }
    with sole_writer(out), atomic_writer(out) as file:
        file.write("".join(lines).encode())
        file.flush()  # on the disk, or older documents would get a new note
        atomic_write_json(out.with_name(f"{out.name}.meta.json"), meta)
    return {"documents": len(lines)}
