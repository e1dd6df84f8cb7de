"""``lean-laguna plan``: what a model takes on a card, whether it fits, and what would."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from lean_laguna.cli.inspect import given_target
from lean_laguna.cli.parser import Parser, one_of, whole
from lean_laguna.core.errors import ConfigError

if TYPE_CHECKING:
    from lean_laguna.plan.fitting import Room

HELP = """\
usage: lean-laguna plan CHECKPOINT | --shape NAME [options]

What weights, drafter, KV cache and workspace take on a card; the longest context and the most
streams that fit; vLLM's arithmetic beside ours. Exit status 1 where it does not fit.

  CHECKPOINT                a folder, a config.json alone, a built-in name, a downloaded repository
  --shape NAME, --scheme S  a published shape and how it is stored (see: lean-laguna inspect --help)
  --drafter NAME            a folder, a name, or a shape's name
  --card NAME               h200, h100, gb10, rtx-5090, rtx-pro-6000 ...
  --memory SIZE             or an amount: 24GiB, 96GB; else what is free on this machine
  --context N, or --max-model-len N    longest prompt plus output (32768, or the model's limit)
  --streams N, or --max-num-seqs N     requests at once, each of that length (1)
  --dtype TYPE              bfloat16 (usual) or float32, of unquantised weights, keys and values
  --kv-cache-dtype TYPE     auto (as --dtype) or fp8; --no-prefix-caching: no cached ends of prompts
  --prefill-chunk-size N    prompt rows per step (8192, on a CPU 256); --kv-block-size N (16)
  --vllm-kv-dtype TYPE      auto (what the checkpoint asks for), bfloat16 or fp8
  --max-num-batched-tokens N                    vLLM's rows per step (8192)
  --cap                     also the systemd-run line that caps a run's memory, start-up included
  --json                    one line of JSON last, and nothing else on standard output

example: lean-laguna plan --shape laguna-xs-2.1 --scheme nvfp4 --drafter laguna-xs-2.1 --card gb10
"""


def build_parser() -> Parser:
    """Return the command's parser."""
    parser = Parser("lean-laguna plan", HELP)
    parser.add_argument("checkpoint", nargs="?")
    for name in ("--shape", "--scheme", "--drafter", "--card", "--memory"):
        parser.add_argument(name)
    parser.add_argument("--context", "--max-model-len", type=whole(1))
    parser.add_argument("--streams", "--max-num-seqs", type=whole(1, 1 << 20), default=1)
    parser.add_argument("--dtype", type=one_of("bfloat16", "float32"))
    parser.add_argument("--kv-cache-dtype", type=one_of("auto", "fp8"), default="auto")
    parser.add_argument("--no-prefix-caching", action="store_true")
    parser.add_argument("--prefill-chunk-size", type=whole(1))
    parser.add_argument("--kv-block-size", type=whole(1), default=16)
    parser.add_argument("--vllm-kv-dtype", type=one_of("auto", "bfloat16", "fp8"), default="auto")
    parser.add_argument("--max-num-batched-tokens", type=whole(1), default=8192)
    parser.add_argument("--cap", action="store_true")
    parser.add_argument("--json", action="store_true")
    return parser


def run(args: argparse.Namespace) -> int:
    """Plan; returns 1 where it does not fit.

    Raises:
        LeanLagunaError: A mistake in the call or its input.
    """
    from lean_laguna.core.config import EngineConfig
    from lean_laguna.models.catalog import default_drafter
    from lean_laguna.models.shapes import SHAPES, repository_of
    from lean_laguna.plan.engine_memory import EngineLimits
    from lean_laguna.plan.fitting import Wish, plan
    from lean_laguna.plan.subject import drafter_of

    # The engine's own check of the two sizes.
    EngineConfig(prefill_chunk_size=args.prefill_chunk_size, kv_block_size=args.kv_block_size)
    target = given_target(args)
    drafter = drafter_of(args.drafter) if args.drafter else None
    room, is_on_gpu = given_room(args)
    limits = EngineLimits(
        args.dtype or ("bfloat16" if is_on_gpu else "float32"),
        args.prefill_chunk_size,
        args.kv_block_size,
        not args.no_prefix_caching,
        is_on_gpu,
        args.kv_cache_dtype,
    )
    is_fp8 = args.vllm_kv_dtype == "fp8" or (args.vllm_kv_dtype == "auto" and target.inventory.has_fp8_kv)
    context = args.context or min(32768, target.config.max_position_embeddings)
    wish = Wish(context, args.streams, limits, 1 if is_fp8 else 2, args.max_num_batched_tokens)
    found = plan(target, drafter, room, wish)
    from lean_laguna.cli.terminal import Terminal
    from lean_laguna.plan.plan_report import cap_line, plan_report

    terminal = Terminal(is_json=args.json)
    problems = target.files.problems if target.files is not None else ()
    if problems:
        rest = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        terminal.note(f"{target.name} is not whole: {problems[0]}{rest}; see 'lean-laguna inspect'")
    found["problems"] = list(problems)
    terminal.report(plan_report(found))
    if args.cap and not found["lean_laguna"]["fits"]:
        terminal.note("no cap: what does not fit must not be started")
    elif args.cap:
        model = args.checkpoint or repository_of(args.shape)
        with_drafter = (
            default_drafter(repository_of(args.drafter)) if args.drafter in SHAPES else args.drafter
        )
        found["cap"] = cap_line(found, model, with_drafter)
        terminal.report(found["cap"])
    terminal.json_line(found)
    return 0 if found["lean_laguna"]["fits"] else 1


def given_room(args: argparse.Namespace) -> tuple[Room, bool]:
    """Return the memory to plan with, and whether it is a GPU's.

    Raises:
        ConfigError: Both a card and an amount, or neither is understood.
    """
    from lean_laguna.plan.cards import card
    from lean_laguna.plan.fitting import Room
    from lean_laguna.plan.units import parse_bytes

    if args.card is not None and args.memory is not None:
        raise ConfigError("--card and --memory both say how much memory there is; leave one out")
    if args.card is not None:
        found = card(args.card)
        origin = found.name + (", less 8 GiB for the system" if found.is_unified else "")
        return Room(found.usable_bytes, origin, found.is_unified), True
    if args.memory is not None:
        return Room(parse_bytes(args.memory, "--memory"), "as given"), True
    from lean_laguna.engine.kv_budget import free_memory_bytes
    from lean_laguna.engine.loading import resolve_device

    device = resolve_device("auto")
    where = "free on this machine's GPU" if device.type == "cuda" else "free in this machine's memory"
    return Room(free_memory_bytes(device), where, device.type == "cpu"), device.type == "cuda"
