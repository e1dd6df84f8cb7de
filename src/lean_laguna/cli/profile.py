"""``lean-laguna bench --profile``: where a decode step's time goes."""

from __future__ import annotations

import argparse
from typing import Any

from lean_laguna.cli.options import engine_options, is_dummy, require_models, set_threads
from lean_laguna.core.errors import ConfigError
from lean_laguna.core.files import atomic_write_json, require_writable

CONTEXT_LEN = 2048
# What the measurement of a pair takes, and this one could not honour.
_OF_PAIRS = ("base_url", "base_url_b", "demo", "html", "num_prompts", "repeats", "speculative_config")


def run_profile(args: argparse.Namespace) -> int:
    """Profile decoding without drafts, and print or write what was found.

    Raises:
        LeanLagunaError: A mistake in the call, or no such model.
    """
    for name in _OF_PAIRS:
        if getattr(args, name):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag}: not with --profile, which times one engine here, undrafted")
    if args.out is not None:
        require_writable(args.out)
    if not is_dummy(args):
        require_models(args.model)
    options: dict[str, Any] = engine_options(args)
    from lean_laguna.bench.profile import NUM_STEPS, profile, profile_report
    from lean_laguna.cli.terminal import Terminal
    from lean_laguna.engine.llm import LLM

    terminal = Terminal(is_json=args.json)
    llm = LLM(args.model, max_num_seqs=1, enable_prefix_caching=False, **options)
    set_threads(args, llm)
    context_len = min(CONTEXT_LEN, llm.engine.max_model_len - 4 * NUM_STEPS)
    content = profile(llm, max(1, context_len))
    terminal.report(profile_report(content))
    if args.out is not None:
        atomic_write_json(args.out, content)
        terminal.note(f"result: {args.out}")
    terminal.json_line(content)
    return 0
