"""``lean-laguna sweep``: speed and parity against the draft length."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from lean_laguna.cli.measuring import add_plan_options, draft_lengths, make_plan, two_sides, write_files
from lean_laguna.cli.options import add_model_options, add_sampling_options
from lean_laguna.cli.parser import Parser, whole_list

if TYPE_CHECKING:
    from lean_laguna.backends.base import Backend

USUAL_LENGTHS = (1, 2, 3, 4, 5, 7, 9, 11, 15)
HELP = """\
usage: lean-laguna sweep [options]

Measure decode speed for several draft lengths, interleaved, compare every output with the one
without a drafter, and name the best length on this machine. Exit status 1 if an output differs.

  --draft-lengths 1,3,7     what to try; else 1,2,3,4,5,7,9,11,15 as far as the drafter goes
  --model NAME, --drafter NAME   nano, a folder, a downloaded repository; auto, or a name
  --base-url URL            ask a server, which must take a draft length per request; --api-key KEY
  --base-url-b URL          the draft lengths on this server, the baseline on that one
  --prompts SET             mixed (14, easy to hard), trivial (20), or a .jsonl or text file
  --num-prompts N           only N of them, spread over the set
  --repeats 2, --warmup 1   measured passes, and generations per length before them
  --svg FILE, --html FILE, --out FILE   write the chart, a page with it, the result file
  --json                    one line of JSON last, and nothing else on standard output
sampling, with vLLM's names; greedy and 256 tokens unless given:
  --temperature T --top-p P --top-k K --min-p P --seed S --max-tokens N --structured-outputs JSON
  --min-tokens N --ignore-eos --repetition-penalty R --presence-penalty P --frequency-penalty F
  --thinking-token-budget N --logit-bias ID=B... --stop TEXT... --stop-token-ids ID... --logprobs N
  --bad-words TEXT... --allowed-token-ids ID... --prompt-logprobs N --include-stop-str-in-output
  --keep-special-tokens
engine: --device auto|cpu|cuda  --dtype auto|float32|bfloat16  --threads N  --max-model-len N
  --attention-factor X  --kv-cache-dtype auto|fp8
example: lean-laguna sweep --draft-lengths 3,5,7,9 --num-prompts 4 --svg sweep.svg
"""


def build_parser() -> Parser:
    """Return the command's parser."""
    parser = Parser("lean-laguna sweep", HELP)
    parser.add_argument("--draft-lengths", type=whole_list(1))
    parser.add_argument("--svg")
    add_model_options(parser)
    add_plan_options(parser, repeats=2)
    add_sampling_options(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the sweep; returns 1 where an output differs.

    Raises:
        LeanLagunaError: A mistake in the call or its input.
    """
    plan = make_plan(args)
    from lean_laguna.bench.report import heading, sweep_report
    from lean_laguna.bench.results import describe
    from lean_laguna.bench.sweep import run_sweep
    from lean_laguna.cli.terminal import Terminal

    terminal = Terminal(is_json=args.json)
    with two_sides(args, plan) as (baseline, drafting):
        lengths = draft_lengths(args.draft_lengths, USUAL_LENGTHS, drafting)
        sides: dict[int, Backend] = {
            0: baseline,
            **{length: drafting.with_draft_length(length) for length in lengths},
        }
        with terminal.progress() as progress:
            result = run_sweep(sides, plan, progress)
        engines = {"baseline": baseline.info(), "drafting": drafting.info()}
    content = describe("sweep", plan, result.to_dict(), engines=engines)
    terminal.report(heading(content))
    terminal.report(sweep_report(content))
    write_files(args, content, terminal)
    terminal.json_line(content)
    return 1 if result.num_mismatches else 0
