"""Options and sides of commands that ask a server over HTTP instead of loading a model."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lean_laguna.cli.parser import Parser
from lean_laguna.core.env import PREFIX
from lean_laguna.core.errors import ConfigError

if TYPE_CHECKING:
    from lean_laguna.backends.http import HttpBackend
    from lean_laguna.bench.rounds import Plan

# Flags about an engine in this process, with their value where nobody gave them.
_LOCAL = {
    "drafter": "auto",
    "speculative_config": None,
    "device": "auto",
    "dtype": "auto",
    "threads": None,
    "max_model_len": None,
    "attention_factor": None,
    "kv_cache_dtype": "auto",
    "kernels": "auto",
    "load_format": "auto",
    "shape": None,
    "scheme": None,
    "demo": False,
    "profile": False,
    "draft_profile": None,
}


def add_remote_options(parser: Parser, *, is_pair: bool = True) -> None:
    """Add the server's address, a second one's for the other side, and the key."""
    parser.add_argument("--base-url")
    if is_pair:
        parser.add_argument("--base-url-b")
    parser.add_argument("--api-key")


def connect(args: argparse.Namespace, base_url: str) -> HttpBackend:
    """Return a backend on a server.

    Raises:
        ConfigError: A flag makes no sense with a server, or the server refuses the key or the model.
        BackendError: The server cannot be reached.
    """
    for name, unset in _LOCAL.items():
        if getattr(args, name, unset) != unset:
            raise ConfigError(f"--{name.replace('_', '-')}: not with --base-url; the server has chosen it")
    from lean_laguna.backends.http import HttpBackend

    key = args.api_key or os.environ.get(f"{PREFIX}API_KEY") or os.environ.get("OPENAI_API_KEY")
    return HttpBackend(base_url, model=args.model if args.is_model_given else None, api_key=key)


@contextlib.contextmanager
def remote_sides(args: argparse.Namespace, plan: Plan) -> Iterator[tuple[HttpBackend, HttpBackend]]:
    """Yield the baseline and the side to compare with it.

    With two addresses these are the two servers as they are. With one, they are the same server asked to
    draft nothing, and asked to draft as it does, or with a given length.

    Raises:
        LeanLagunaError: A server cannot be reached, or has no such switch.
    """
    args.synthetic = {}
    length = getattr(args, "num_speculative_tokens", "auto")
    with contextlib.ExitStack() as stack:
        first = connect(args, args.base_url)
        stack.callback(first.close)
        second = first
        if args.base_url_b is not None:
            second = connect(args, args.base_url_b)
            stack.callback(second.close)
        if not plan.params.is_greedy:
            for server in {first, second}:
                server.check_seed()
        baseline = first if args.base_url_b is not None else first.with_speculation(False)
        yield baseline, second if length == "auto" else second.with_speculation(int(length))


def check_remote(args: argparse.Namespace) -> None:
    """Refuse a second server or a key without a first one.

    Raises:
        ConfigError: Naming the flag.
    """
    for name in ("base_url_b", "api_key"):
        if getattr(args, name, None) is not None and args.base_url is None:
            raise ConfigError(f"--{name.replace('_', '-')} needs --base-url")
