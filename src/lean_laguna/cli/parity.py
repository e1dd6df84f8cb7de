"""``lean-laguna parity``: whether speculation changes anything, prompt by prompt, with a control."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from lean_laguna.cli.measuring import add_plan_options, draft_lengths, make_plan, two_sides, write_files
from lean_laguna.cli.options import add_model_options, add_sampling_options
from lean_laguna.cli.parser import Parser, whole_list

if TYPE_CHECKING:
    from lean_laguna.backends.base import Backend

USUAL_LENGTHS = (1, 3, 7, 15)
HELP = """\
usage: lean-laguna parity [options]

Run every prompt twice without a drafter (the control) and once with each draft length; compare.
Verdicts: identical; near-tie, where the first tokens that differ had almost the same score;
mismatch. Exit status 1 on a mismatch.

  --draft-lengths 1,7       what to compare; else 1,3,7,15 as far as the drafter goes
  --strict                  exit status 1 on a near-tie too
  --model NAME, --drafter NAME   nano, a folder, a downloaded repository; auto, or a name
  --base-url URL            ask a server: vLLM, SGLang, llama.cpp, ours; also --model, --api-key KEY
  --base-url-b URL          compare this server with that one, as they are
  --prompts SET             mixed (14, easy to hard), trivial (20), or a .jsonl or text file
  --num-prompts N           only N of them, spread over the set
  --out FILE, --html FILE   write the result file, a page
  --json                    one line of JSON last, and nothing else on standard output
sampling, with vLLM's names; greedy and 256 tokens unless given:
  --temperature T --top-p P --top-k K --min-p P --seed S --max-tokens N --structured-outputs JSON
  --min-tokens N --ignore-eos --repetition-penalty R --presence-penalty P --frequency-penalty F
  --thinking-token-budget N --logit-bias ID=B... --stop TEXT... --stop-token-ids ID... --logprobs N
  --bad-words TEXT... --allowed-token-ids ID... --prompt-logprobs N --include-stop-str-in-output
  --keep-special-tokens
engine: --device auto|cpu|cuda  --dtype auto|float32|bfloat16  --threads N  --max-model-len N
  --attention-factor X  --kv-cache-dtype auto|fp8
example: lean-laguna parity --temperature 0.8 --seed 1 --draft-lengths 3,15
"""


def build_parser() -> Parser:
    """Return the command's parser."""
    parser = Parser("lean-laguna parity", HELP)
    parser.add_argument("--draft-lengths", type=whole_list(1))
    parser.add_argument("--strict", action="store_true")
    add_model_options(parser)
    add_plan_options(parser, repeats=None)
    add_sampling_options(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Compare; returns 1 on a mismatch.

    Raises:
        LeanLagunaError: A mistake in the call or its input.
    """
    plan = make_plan(args)
    from lean_laguna.bench.parity import run_parity
    from lean_laguna.bench.report import heading, parity_report
    from lean_laguna.bench.results import describe
    from lean_laguna.cli.terminal import Terminal

    terminal = Terminal(is_json=args.json)
    with two_sides(args, plan) as (baseline, drafting):
        sides: dict[str, Backend] = {"other server": drafting}
        if args.base_url_b is None or args.draft_lengths is not None:
            lengths = draft_lengths(args.draft_lengths, USUAL_LENGTHS, drafting)
            sides = {_name(length): drafting.with_draft_length(length) for length in lengths}
        with terminal.progress() as progress:
            result = run_parity(baseline, sides, plan, progress)
        engines = {"baseline": baseline.info(), "drafting": drafting.info()}
    content = describe("parity", plan, result.to_dict(), engines=engines)
    terminal.report(heading(content))
    terminal.report(parity_report(content))
    write_files(args, content, terminal)
    terminal.json_line(content)
    return 1 if result.num_mismatches or (args.strict and result.num_near_ties) else 0


def _name(length: int) -> str:
    return f"{length} draft token" if length == 1 else f"{length} draft tokens"
