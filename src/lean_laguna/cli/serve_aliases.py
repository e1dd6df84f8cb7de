"""Flags of ``vllm serve`` that ask for nothing here: taken where they name what is so, refused where not."""

from __future__ import annotations

import argparse

from lean_laguna.cli.parser import Parser
from lean_laguna.core.errors import ConfigError

# What is already so, or has no meaning on one machine; the flag alone is fine.
SWITCHES = ("--trust-remote-code", "--enforce-eager", "--enable-auto-tool-choice", "--disable-log-requests")
SWITCHES += ("--disable-log-stats", "--enable-chunked-prefill", "--enable-prompt-tokens-details")
# Flags with a value, and the values that say what is so anyway.
VALUES: dict[str, tuple[str, ...]] = {
    "--tensor-parallel-size": ("1",),
    "--pipeline-parallel-size": ("1",),
    "--data-parallel-size": ("1",),
    "--kv-cache-dtype": ("auto",),
    "--moe-backend": ("auto",),
    "--generation-config": ("auto",),
    "--gpu-memory-utilization": (),
}


def add_accepted_options(parser: Parser) -> None:
    """Add the flags."""
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
        if name == "--gpu-memory-utilization":
            raise ConfigError(
                f"{name}: not supported; say the bytes for keys and values: --kv-cache-memory-bytes"
            )
        raise ConfigError(f"{name}: only {' or '.join(accepted)} is supported here, found {value!r:.100}")
