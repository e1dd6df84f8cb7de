"""Flags of other servers: vLLM's that name what is so anyway, and llama.cpp's and SGLang's names for ours."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lean_laguna.cli.parser import Parser
from lean_laguna.core.errors import ConfigError

# What is already so, or has no meaning on one machine; the flag alone is fine.
SWITCHES: tuple[str, ...] = (
    "--trust-remote-code",
    "--enforce-eager",
    "--enable-auto-tool-choice",
    "--disable-log-requests",
    "--disable-log-stats",
    "--enable-chunked-prefill",
    "--enable-prompt-tokens-details",
)
# Flags with a value, and the values that say what is so anyway.
VALUES: dict[str, tuple[str, ...]] = {
    "--tensor-parallel-size": ("1",),
    "--pipeline-parallel-size": ("1",),
    "--data-parallel-size": ("1",),
    "--moe-backend": ("auto",),
    "--generation-config": ("auto",),
    "--gpu-memory-utilization": (),
    "--mem-fraction-static": (),
    "--speculative-algorithm": ("DFLASH", "DSPARK"),
    "--spec-type": ("draft-dflash", "draft-dspark"),
    "--reasoning-format": ("auto", "deepseek"),
    "--reasoning-budget": ("-1",),
}
_SHARES_OF_MEMORY = ("--gpu-memory-utilization", "--mem-fraction-static")
# Names that llama.cpp and SGLang use, with ours.
ALIASES = {
    "-m": "--model",
    "--model-path": "--model",
    "-a": "--served-model-name",
    "--alias": "--served-model-name",
    "-md": "--drafter",
    "--model-draft": "--drafter",
    "--speculative-draft-model-path": "--drafter",
    "--spec-draft-n-max": "--num-speculative-tokens",
    "--speculative-num-draft-tokens": "--num-speculative-tokens",
    "-c": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "--context-length": "--max-model-len",
    "-np": "--max-num-seqs",
    "--parallel": "--max-num-seqs",
    "--max-running-requests": "--max-num-seqs",
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--chat-template-kwargs": "--default-chat-template-kwargs",
}
_WITHOUT_EFFECT = ("--jinja",)
_COUNTS_ANCHOR = "--speculative-num-draft-tokens"


def add_accepted_options(parser: Parser) -> None:
    """Add vLLM's flags."""
    for name in SWITCHES:
        parser.add_argument(name, action="store_true")
    for name in VALUES:
        parser.add_argument(name)


def refuse_unsupported(args: argparse.Namespace) -> None:
    """Refuse a value that this server could not honour.

    Raises:
        ConfigError: Names the flag, the value and what is taken.
    """
    for name, accepted in VALUES.items():
        value = getattr(args, name.strip("-").replace("-", "_"))
        if value is None or value in accepted:
            continue
        if name in _SHARES_OF_MEMORY:
            raise ConfigError(f"{name}: not supported; give the bytes: --kv-cache-memory-bytes")
        raise ConfigError(f"{name}: only {' or '.join(accepted)} is supported here, found {value!r:.100}")


def in_our_names(argv: Sequence[str]) -> list[str]:
    """Return a command line with other servers' flags under our names, and dashes for underscores in flags.

    Raises:
        ConfigError: A converted value is no number.
    """
    words: list[str] = []
    given = iter(argv)
    for word in given:
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            flag = flag.replace("_", "-")
        if flag in _WITHOUT_EFFECT:
            continue
        if flag == _COUNTS_ANCHOR:  # SGLang counts the anchor token among the drafts
            value = value if equals else next(given, "")
            if not value.isdigit() or int(value) < 1:
                raise ConfigError(f"{flag}: must be a whole number from 1, found {value!r}")
            words += [ALIASES[flag], str(int(value) - 1)]
            continue
        words.append(ALIASES.get(flag, flag) + equals + value if flag.startswith("-") else word)
    return words
