"""``lean-laguna inspect``: what is quantised how, what a token reads, how fast it can be, what is missing."""

from __future__ import annotations

import argparse
import itertools
from typing import TYPE_CHECKING, Any

from lean_laguna.cli.parser import Parser, one_of, whole, whole_list
from lean_laguna.core.errors import ConfigError

if TYPE_CHECKING:
    from lean_laguna.cli.terminal import Terminal
    from lean_laguna.plan.bandwidth import Bandwidth
    from lean_laguna.plan.subject import Target

MOST_ROWS = 4096
"""Far beyond what memory alone bounds."""
KV_BYTES = {"bfloat16": 2, "fp8": 1, "float32": 4}
HELP = """\
usage: lean-laguna inspect CHECKPOINT | --shape NAME [options]

What is quantised how, the bytes that a decoded token reads, the speed that no engine can go beyond,
and whether every file is whole. Reads headers only. Exit status 1 where something is missing.

  CHECKPOINT                a folder, a config.json alone, a built-in name, a downloaded repository
  --shape NAME              laguna-xs, laguna-xs-2.1 or laguna-s-2.1, without a checkpoint
  --scheme NAME             how the shape is stored: bf16 (usual), fp8, int4, int8, nvfp4, fp8-all,
                            nvfp4-routed, nvfp4-attention, nvfp4-fp8-attention, nvfp4-all
  --drafter NAME            also speed with this drafter: a folder, a name, or a shape's name
  --acceptance P1,P2,...    share of drafts accepted up to each position (else .90,.81,.73 ...)
  --card NAME               bandwidth of a card: h200, h100, gb10, rtx-5090, rtx-pro-6000 ...
  --bandwidth GB/S          or a figure: 273, 4.8TB/s; else measured on this machine
  --context N               positions whose keys and values are read (2048)
  --kv-dtype TYPE           bfloat16 (usual), fp8 or float32
  --rows 1,7,16             numbers of verified rows
  --overlap X               share of experts that rows have in common, 0 (uniform) to 1
  --hashes                  SHA-256 of every file, against what its repository states
  --json                    one line of JSON last, and nothing else on standard output

example: lean-laguna inspect --shape laguna-xs --scheme nvfp4 --drafter laguna-xs --card gb10
"""


def build_parser() -> Parser:
    """Return the command's parser."""
    parser = Parser("lean-laguna inspect", HELP)
    parser.add_argument("checkpoint", nargs="?")
    for name in ("--shape", "--scheme", "--drafter", "--card", "--bandwidth"):
        parser.add_argument(name)
    parser.add_argument("--acceptance", type=_rates)
    parser.add_argument("--context", type=whole(0), default=2048)
    parser.add_argument("--kv-dtype", type=one_of(*KV_BYTES), default="bfloat16")
    parser.add_argument("--rows", type=whole_list(1, MOST_ROWS))
    parser.add_argument("--overlap", type=_share, default=0.0)
    parser.add_argument("--hashes", action="store_true")
    parser.add_argument("--json", action="store_true")
    return parser


def run(args: argparse.Namespace) -> int:
    """Inspect; returns 1 where the checkpoint is not whole.

    Raises:
        LeanLagunaError: A mistake in the call or its input.
    """
    from lean_laguna.plan.inspection import USUAL_ROWS, Question, inspect
    from lean_laguna.plan.subject import drafter_of
    from lean_laguna.plan.traffic import CODE_ACCEPTANCE

    target = given_target(args)
    drafter = drafter_of(args.drafter) if args.drafter else None
    rows = args.rows or list(USUAL_ROWS)
    if drafter is not None and args.rows is None:
        rows = [count for count in rows if count <= 1 + drafter.config.max_draft_tokens]
    question = Question(
        given_bandwidth(args),
        args.context,
        rows,
        args.overlap,
        KV_BYTES[args.kv_dtype],
        args.acceptance or CODE_ACCEPTANCE,
    )
    found = inspect(target, drafter, question)
    from lean_laguna.cli.terminal import Terminal
    from lean_laguna.plan.inspect_report import inspection_report

    terminal = Terminal(is_json=args.json)
    is_whole = not found.get("files", {}).get("problems")
    if args.hashes:
        is_whole &= _hash(target, found, terminal)
    terminal.report(inspection_report(found))
    terminal.json_line(found)
    return 0 if is_whole else 1


def given_target(args: argparse.Namespace) -> Target:
    """Return the target that a command line names.

    Raises:
        ConfigError: None or two are named, or a scheme stands without a shape.
        CheckpointError: It is not on this machine.
    """
    from lean_laguna.plan.subject import target_of, target_of_shape

    if (args.checkpoint is None) == (args.shape is None):
        raise ConfigError("give a checkpoint, or --shape and a name such as laguna-xs-2.1; one of the two")
    if args.shape is not None:
        return target_of_shape(args.shape, args.scheme or "bf16")
    if args.scheme is not None:
        raise ConfigError("--scheme says how a --shape is stored; a checkpoint says so itself")
    return target_of(args.checkpoint)


def given_bandwidth(args: argparse.Namespace) -> Bandwidth:
    """Return the bandwidth that a command line gives, else this machine's.

    Raises:
        ConfigError: Both a card and a figure, or neither is understood.
    """
    from lean_laguna.plan.bandwidth import Bandwidth, bandwidth_of_card, measured_bandwidth
    from lean_laguna.plan.units import parse_bandwidth

    if args.card is not None and args.bandwidth is not None:
        raise ConfigError("--card and --bandwidth both give a bandwidth; leave one out")
    if args.bandwidth is not None:
        return Bandwidth(parse_bandwidth(args.bandwidth, "--bandwidth"), "as given")
    return bandwidth_of_card(args.card) if args.card is not None else measured_bandwidth()


def _hash(target: Target, found: dict[str, Any], terminal: Terminal) -> bool:
    """Hash the target's files; True unless one differs from what its repository states."""
    from lean_laguna.plan.files import check_hashes

    if target.files is None:
        raise ConfigError("--hashes needs a checkpoint folder; there is only a configuration")
    with terminal.progress() as progress:
        hashes = check_hashes(target.files, progress)
    found["files"]["hashes"] = hashes
    return all(is_published is not False for _, is_published in hashes.values())


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    falling = all(first >= second for first, second in itertools.pairwise(rates))
    if not rates or not falling or not all(0 <= rate <= 1 for rate in rates):
        raise argparse.ArgumentTypeError(
            f"must be shares from 0 to 1 that do not rise, separated by commas, found {text!r}"
        )
    return rates


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 1, found {text!r}")
    return value
