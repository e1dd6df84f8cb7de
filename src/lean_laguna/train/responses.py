"""Answers written by the target itself, through the engine that will serve it: what a drafter is trained on.

A line of the file is a document: its tokens, which of them the target wrote, and how they were sampled. A
killed run leaves every answer that was whole, and the next one asks for the others. The tokens are the
engine's own, never text tokenised again.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lean_laguna.core.errors import ConfigError, DataError
from lean_laguna.core.files import (
    atomic_write_bytes,
    atomic_write_json,
    parse_json,
    require_writable,
    sha256_file,
)
from lean_laguna.core.provenance import checkpoint_hash
from lean_laguna.core.types import SamplingParams
from lean_laguna.engine.llm import LLM
from lean_laguna.engine.sequence import RequestState
from lean_laguna.train.conversations import Conversation
from lean_laguna.train.loop import Echo
from lean_laguna.train.run_state import difference


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
        batch: Questions with the engine at a time.
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
    out: Path,
    options: ResponseOptions,
    begun: Sequence[str],
    *,
    report: Callable[[str], None] = lambda line: None,
    echo: Echo = lambda kind, values: None,
) -> dict[str, int]:
    """Have every conversation's question answered, and write each document when its answer is whole.

    Args:
        llm: The engine, with a drafter or without: the answers are the same.
        conversations: Their first questions are asked.
        out: JSONL file of documents; in the conversations' order once all are answered.
        options: How the target answers.
        begun: What the file holds, from :func:`begin_responses`.
        report: Receives lines.
        echo: Receives ``answers`` events, one with each answer and otherwise one a second: how many there
            are, of how many, tokens a second, and the seconds left.

    Returns:
        Counts of documents, of those that were there before, and of questions left out since the context has
        no room for them.

    Raises:
        ConfigError: The disk is full.
    """
    written, done = list(begun), set(begun)
    waiting = deque((i, c) for i, c in enumerate(conversations) if c.id not in done)
    pace, asked = _Pace(len(begun), len(conversations), echo), list[_Asked]()
    try:
        with out.open("a", encoding="utf-8") as file:
            while waiting or asked:
                while waiting and len(asked) < options.batch:
                    index, conversation = waiting.popleft()
                    if found := _ask(llm, conversation, index, options):
                        asked.append(found)
                    else:
                        pace.num_left_out += 1
                if asked:
                    llm.engine.step()
                for one in [one for one in asked if one.state.is_finished]:
                    document, num_tokens = one.document(options)
                    file.write(json.dumps(document) + "\n")
                    file.flush()
                    asked.remove(one)
                    written.append(one.id)
                    pace.count(num_tokens)
                pace.tell(sum(one.num_tokens for one in asked))
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror or error}") from None
    finally:
        for one in asked:
            llm.engine.abort(one.state.request_id)
    _put_in_order(out, written, [c.id for c in conversations])
    if pace.num_left_out:
        limit = llm.engine.max_model_len
        report(f"{pace.num_left_out:,} left out: their questions do not fit the context of {limit:,} tokens")
    return {"documents": len(written), "resumed": len(begun), "left_out": pace.num_left_out}


class _Pace:
    """Tells how far the answers are, with each that is whole and otherwise once a second."""

    def __init__(self, num_before: int, num_all: int, echo: Echo):
        self._num_before, self._num_all, self._echo = num_before, num_all, echo
        self._num_answers = self._num_tokens = self.num_left_out = 0
        self._began = time.monotonic()
        self._told = (0, self._began)

    def count(self, num_tokens: int) -> None:
        """Count a whole answer."""
        self._num_answers += 1
        self._num_tokens += num_tokens

    def tell(self, num_tokens: int) -> None:
        """Tell, if it is time; the answers that are not whole have so many tokens."""
        answers, now = self._num_answers, time.monotonic()
        if answers == self._told[0] and now - self._told[1] < 1.0:
            return
        self._told = (answers, now)
        seconds = max(1e-9, now - self._began)
        left = self._num_all - self._num_before - self.num_left_out - answers
        values = {
            "answered": self._num_before + answers,
            "of": self._num_all,
            "tok_per_s": round((self._num_tokens + num_tokens) / seconds),
        }
        self._echo("answers", values | ({"eta_s": round(seconds * left / answers)} if answers else {}))


@dataclass(eq=False)
class _Asked:
    """A question with the engine.

    Attributes:
        id: The conversation's.
        question: Its tokens.
        state: The answer so far.
    """

    id: str
    question: list[int]
    state: RequestState

    @property
    def num_tokens(self) -> int:
        return sum(len(sequence.completion.token_ids) for sequence in self.state.sequences)

    def document(self, options: ResponseOptions) -> tuple[dict[str, Any], int]:
        """Return what is written of a whole answer, and how many tokens it has."""
        answer = self.state.snapshot().outputs[0]
        document = {
            "id": self.id,
            "input_ids": [*self.question, *answer.token_ids],
            "loss_mask": [0] * len(self.question) + [1] * len(answer.token_ids),
            "finish_reason": answer.finish_reason,
            "seed": answer.seed,
            "temperature": options.temperature,
            "is_plain": options.top_p == 1.0 and options.top_k == 0,
        }
        return document, len(answer.token_ids)


def _ask(llm: LLM, conversation: Conversation, index: int, options: ResponseOptions) -> _Asked | None:
    """Hand a question to the engine; None where the context leaves no room for an answer."""
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
    return _Asked(conversation.id, ids, llm.engine.add_request(ids, params))


def begin_responses(out: Path, prompts: Path, options: ResponseOptions, target_folder: Path) -> list[str]:
    """Make the file of documents, or find out what it holds already.

    Args:
        out: JSONL file of documents; beside it ``OUT.meta.json`` says how they are made. A line that a kill
            left half written is cut off.
        prompts: The file that the questions come from, whose hash is recorded.
        options: How the target answers.
        target_folder: The target's checkpoint.

    Returns:
        The ids of its documents, in its order.

    Raises:
        ConfigError: It was begun with other options, prompts or another target, or cannot be written.
        DataError: It is damaged before its last line.
    """
    meta = {
        "target_sha256": checkpoint_hash(target_folder),
        "tokenizer_sha256": sha256_file(target_folder / "tokenizer.json"),
        "prompts_sha256": sha256_file(prompts),
        "sampling": asdict(options),
    }
    beside = out.with_name(f"{out.name}.meta.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    require_writable(out)
    if not out.exists() or not out.stat().st_size:
        atomic_write_json(beside, meta)
        return []
    _check_meta(out, beside, json.loads(json.dumps(meta)))
    lines = out.read_bytes().split(b"\n")
    if half := lines.pop():
        with out.open("r+b") as file:
            file.truncate(out.stat().st_size - len(half))
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(str(parse_json(line)["id"]))
        except (ValueError, KeyError, TypeError):
            raise DataError(
                f"'{out}', line {number}: not a document; remove the file to start anew"
            ) from None
    return found


def _check_meta(out: Path, beside: Path, meta: dict[str, Any]) -> None:
    try:
        stored = parse_json(beside.read_bytes())
    except (OSError, ValueError):
        stored = None
    if not isinstance(stored, dict):
        raise ConfigError(
            f"'{out}' exists, but no whole '{beside.name}' that says how it was made; give another --out, or "
            "remove it"
        )
    if names := [name for name in meta if stored.get(name) != meta[name]]:
        how = f" ({difference(stored.get('sampling'), meta['sampling'])})" if "sampling" in names else ""
        raise ConfigError(
            f"'{out}' was begun with another {' and '.join(names)}{how}; give another --out, or remove it"
        )


def _put_in_order(out: Path, found: Sequence[str], wanted: Sequence[str]) -> None:
    """Bring the documents into an order that does not depend on which answer was whole first."""
    place = {name: i for i, name in enumerate(wanted)}
    places = [place.get(name, len(wanted)) for name in found]
    if places != sorted(places):
        lines = out.read_bytes().split(b"\n")
        order = sorted(range(len(places)), key=places.__getitem__)
        atomic_write_bytes(out, b"".join(lines[i] + b"\n" for i in order))
