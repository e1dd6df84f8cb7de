"""Answers written by the target itself, through the engine that will serve it: what a drafter is trained on.

A line of the file is a document: its tokens, which of them the target wrote, and how they were sampled. A
killed run goes on after the last whole line. The tokens are the engine's own, never text tokenised again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lean_laguna.core.errors import ConfigError, DataError
from lean_laguna.core.files import atomic_write_json, parse_json, sha256_file
from lean_laguna.core.provenance import checkpoint_hash
from lean_laguna.core.types import SamplingParams
from lean_laguna.engine.llm import LLM
from lean_laguna.train.conversations import Conversation
from lean_laguna.train.loop import Echo


@dataclass(frozen=True)
class ResponseOptions:
    """How the target answers.

    Attributes:
        thinking: Passed to the chat template as ``enable_thinking``; None leaves the template's default.
        temperature: 0 for greedy.
        top_p: Of the filter.
        top_k: Of the filter, 0 for none.
        max_tokens: Longest answer; where the context is shorter, what is left of it.
        seed: Of the run; each answer's own seed follows from it and is recorded.
        batch: Conversations asked at once.
    """

    thinking: bool | None = None
    temperature: float = 0.7
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 2048
    seed: int = 0
    batch: int = 64


def write_responses(
    llm: LLM,
    conversations: Sequence[Conversation],
    prompts: Path,
    out: Path,
    options: ResponseOptions,
    *,
    target_folder: Path,
    report: Callable[[str], None] = lambda line: None,
    echo: Echo = lambda kind, values: None,
) -> dict[str, int]:
    """Have every conversation's question answered, and write the documents as they come.

    Args:
        llm: The engine, with a drafter or without: the answers are the same.
        conversations: Their first questions are asked.
        prompts: The file they came from, whose hash is recorded.
        out: JSONL file of documents; beside it ``OUT.meta.json`` says how they were made.
        options: How the target answers.
        target_folder: The target's checkpoint.
        report: Receives lines.
        echo: Receives ``answers`` events, one with each answer and otherwise one a second: how many there
            are, of how many, tokens a second, and the seconds left.

    Returns:
        Counts of documents, of those that were there before, and of questions left out since the context has
        no room for them.

    Raises:
        ConfigError: The file was begun with other options, prompts or another target.
        DataError: It is damaged before its last line.
    """
    meta = {
        "target_sha256": checkpoint_hash(target_folder),
        "tokenizer_sha256": sha256_file(target_folder / "tokenizer.json"),
        "prompts_sha256": sha256_file(prompts),
        "sampling": asdict(options),
    }
    done = _begun(out, meta)
    waiting = [(i, c) for i, c in enumerate(conversations) if c.id not in done]
    pace = _Pace(len(done), len(conversations), echo)
    num_left_out = 0
    with out.open("a", encoding="utf-8") as file:
        for start in range(0, len(waiting), options.batch):
            batch = waiting[start : start + options.batch]
            asked = [(c, *found) for i, c in batch if (found := _request(llm, c, i, options))]
            num_left_out += len(batch) - len(asked)
            outputs = llm.generate(
                [{"prompt_token_ids": ids} for _, ids, _ in asked],
                [p for _, _, p in asked],
                on_progress=pace.watch,
            )
            for (conversation, ids, _), output in zip(asked, outputs, strict=True):
                answer = output.outputs[0]
                document = {
                    "id": conversation.id,
                    "input_ids": [*ids, *answer.token_ids],
                    "loss_mask": [0] * len(ids) + [1] * len(answer.token_ids),
                    "finish_reason": answer.finish_reason,
                    "seed": answer.seed,
                    "temperature": options.temperature,
                    "is_plain": options.top_p == 1.0 and options.top_k == 0,
                }
                file.write(json.dumps(document) + "\n")
            file.flush()
            pace.end_batch(len(asked), sum(len(o.outputs[0].token_ids) for o in outputs), len(batch))
    if num_left_out:
        limit = llm.engine.max_model_len
        report(f"{num_left_out:,} left out: their questions do not fit the context of {limit:,} tokens")
    return {"documents": len(conversations) - num_left_out, "resumed": len(done), "left_out": num_left_out}


class _Pace:
    """Tells how far the answers are, with each that is whole and otherwise once a second."""

    def __init__(self, num_before: int, num_all: int, echo: Echo):
        self._num_before, self._num_left, self._echo = num_before, num_all - num_before, echo
        self._num_answers = self._num_tokens = 0  # of the batches that are done
        self._began = time.monotonic()
        self._told = (0, self._began)

    def watch(self, num_finished: int, _: int, num_tokens: int) -> None:
        """Take the state of a batch; see ``LLM.generate``."""
        answers, now = self._num_answers + num_finished, time.monotonic()
        if answers == self._told[0] and now - self._told[1] < 1.0:
            return
        self._told = (answers, now)
        seconds = max(1e-9, now - self._began)
        left = self._num_left - num_finished
        values = {
            "answered": self._num_before + answers,
            "of": self._num_before + self._num_answers + self._num_left,
            "tok_per_s": round((self._num_tokens + num_tokens) / seconds),
        }
        self._echo("answers", values | ({"eta_s": round(seconds * left / answers)} if answers else {}))

    def end_batch(self, num_asked: int, num_tokens: int, size: int) -> None:
        """Count a batch whose every answer is whole; those not asked had no room."""
        self._num_answers += num_asked
        self._num_tokens += num_tokens
        self._num_left -= size


def _request(
    llm: LLM, conversation: Conversation, index: int, options: ResponseOptions
) -> tuple[list[int], SamplingParams] | None:
    """Return a question's tokens and how it is answered; None where the context leaves no room."""
    switches: dict[str, Any] = {} if options.thinking is None else {"enable_thinking": options.thinking}
    ids = llm.tokenizer.encode(llm.chat_template.render(conversation.question(), **switches))
    room = llm.engine.max_model_len - len(ids)
    if room < 1:
        return None
    params = SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        max_tokens=min(options.max_tokens, room),
        seed=options.seed * 1_000_003 + index,
    )
    return ids, params


def _begun(out: Path, meta: dict[str, Any]) -> set[str]:
    """Return the ids that the file holds already, after cutting off a line that a kill left half written."""
    beside = out.with_name(f"{out.name}.meta.json")
    if not out.exists() or not out.stat().st_size:
        out.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_json(beside, meta)
        return set()
    try:
        stored = parse_json(beside.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ConfigError(f"'{out}' exists, but not the '{beside.name}' that says how it was made") from None
    if stored != json.loads(json.dumps(meta)):
        names = [name for name in meta if stored.get(name) != json.loads(json.dumps(meta[name]))]
        raise ConfigError(
            f"'{out}' was begun with another {' and '.join(names)}; give another --out, or remove it"
        )
    data = out.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        with out.open("r+b") as file:
            file.truncate(len(whole))
    found = set()
    for number, line in enumerate(whole.decode("utf-8").splitlines(), 1):
        try:
            found.add(str(parse_json(line)["id"]))
        except (ValueError, KeyError, TypeError):
            raise DataError(
                f"'{out}', line {number}: not a document; remove the file to start anew"
            ) from None
    return found
