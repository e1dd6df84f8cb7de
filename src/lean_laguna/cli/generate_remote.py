"""``lean-laguna generate --base-url``: the same, from a server."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lean_laguna.cli.options import sampling_params
from lean_laguna.cli.remote import connect
from lean_laguna.core.errors import ConfigError

if TYPE_CHECKING:
    from lean_laguna.backends.base import GenerationResult
    from lean_laguna.backends.http import HttpBackend
    from lean_laguna.cli.terminal import Terminal
    from lean_laguna.core.types import SamplingParams

# A server may have defaults of its own, and says nothing of them: ours are sent.
DEFAULTS = {"temperature": 0.0, "max_tokens": 256}


def run_remote(args: argparse.Namespace, prompt: str, given: dict[str, Any]) -> int:
    """Generate on a server and print; returns the exit status.

    Raises:
        LeanLagunaError: A mistake in the call, or the server cannot do it.
    """
    from lean_laguna.cli.terminal import Terminal

    if given.get("n", 1) != 1:
        raise ConfigError("-n: one completion at a time with --base-url")
    if args.show_drafts and args.chat:
        raise ConfigError("--show-drafts: not with --chat and --base-url")
    params = sampling_params(given, DEFAULTS)
    terminal = Terminal(is_json=args.json, color=args.color)
    backend = connect(args, args.base_url)
    try:
        length = args.num_speculative_tokens
        side = backend if length == "auto" else backend.with_speculation(length if length > 0 else False)
        printer = _Printer(terminal, show_drafts=args.show_drafts)
        message = [{"role": "system", "content": args.system}] if args.system is not None else []
        message.append({"role": "user", "content": prompt})
        result = side.stream(message if args.chat else prompt, params, printer.show, is_chat=args.chat)
        terminal.out.print()
        terminal.note(_summary(side, result, params))
        for limit in side.limits:
            terminal.note(f"note: {limit}")
        if args.show_drafts and not printer.has_marks:
            terminal.note("note: this server does not say which tokens were drafts")
        terminal.json_line(_to_json(side, prompt, result))
    finally:
        backend.close()
    return 0


class _Printer:
    """Prints a stream's text as it comes.

    Attributes:
        has_marks: The server says which tokens were drafts.
    """

    def __init__(self, terminal: Terminal, *, show_drafts: bool):
        self._console = terminal.out
        self._show_drafts = show_drafts and terminal.out.is_terminal
        self._pending: list[tuple[str, bool]] = []
        self.has_marks = False

    def show(self, choice: Mapping[str, Any]) -> None:
        """Print what a choice adds."""
        from lean_laguna.cli.drafts import harmless

        self.has_marks |= "token_texts" in choice
        delta = choice.get("delta") or {}
        thought = delta.get("reasoning") or delta.get("reasoning_content") or ""
        text = choice.get("text") or delta.get("content") or ""
        if self._show_drafts:
            self._show_marked(choice, text)
        else:
            self._console.file.write(
                harmless(thought + text) if self._console.is_terminal else thought + text
            )
        self._console.file.flush()

    def _show_marked(self, choice: Mapping[str, Any], text: str) -> None:
        from rich.text import Text

        from lean_laguna.cli.drafts import DRAFT_STYLE, harmless

        pieces = zip(choice.get("token_texts", (text,)), choice.get("is_draft_token", (False,)), strict=True)
        self._pending += pieces
        line, room = Text(), len(text)
        while self._pending and room > 0:  # no further than the text goes: a stop text cuts tokens
            piece, is_draft = self._pending.pop(0)
            line.append(harmless(piece[:room]), style=DRAFT_STYLE if is_draft else "")
            if len(piece) > room:
                self._pending.insert(0, (piece[room:], is_draft))
            room -= len(piece)
        self._console.print(line, end="", soft_wrap=True, highlight=False)


def _summary(backend: HttpBackend, result: GenerationResult, params: SamplingParams) -> str:
    from lean_laguna.cli.drafts import acceptance_text

    parts = [f"{result.num_tokens} tokens ({result.finish_reason})"]
    if result.ttft_s is not None:
        parts.append(f"first after {1000 * result.ttft_s:.0f} ms")
    if result.decode_s:
        parts.append(f"then {result.num_decode_tokens / result.decode_s:.1f} tok/s")
    if result.speculation is not None and (brought := acceptance_text(result.speculation)) is not None:
        parts.append(brought)
    parts.append("greedy" if params.is_greedy else f"temperature {params.temperature:g}")
    return f"[{' · '.join(parts)} · {backend.model} at {backend.base_url}]"


def _to_json(backend: HttpBackend, prompt: str, result: GenerationResult) -> dict[str, Any]:
    completion: dict[str, Any] = {
        "index": 0,
        "text": result.text,
        "token_ids": list(result.token_ids),
        "num_tokens": result.num_tokens,
        "finish_reason": result.finish_reason,
    }
    stats = result.speculation
    if stats is not None:
        completion["speculative_decoding"] = {
            "mean_acceptance_length": stats.mean_acceptance_length,
            "draft_acceptance_rate": stats.draft_acceptance_rate,
            "num_drafts": stats.num_drafts,
            "num_draft_tokens": stats.num_draft_tokens,
            "num_accepted_tokens": stats.num_accepted_tokens,
            "num_accepted_tokens_per_pos": list(stats.num_accepted_tokens_per_pos),
        }
    line: dict[str, Any] = {
        **backend.info(),
        "prompt": prompt,
        "num_prompt_tokens": result.num_prompt_tokens,
        "num_cached_tokens": result.num_cached_tokens,
        "outputs": [completion],
    }
    times = {"ttft_s": result.ttft_s, "decode_s": result.decode_s}
    return line | {name: value for name, value in times.items() if value is not None}
