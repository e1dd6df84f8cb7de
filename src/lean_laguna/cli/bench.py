"""``lean-laguna bench``: the A/B of a target without a drafter and with one."""

from __future__ import annotations

import argparse

from lean_laguna.cli.measuring import add_plan_options, make_plan, two_sides, write_files
from lean_laguna.cli.options import (
    add_draft_length_option,
    add_dummy_options,
    add_model_options,
    add_sampling_options,
)
from lean_laguna.cli.parser import Parser

REPEATS = 3
DEMO_NUM_PROMPTS, DEMO_MAX_TOKENS, DEMO_REPEATS = 7, 128, 2
HELP = """\
usage: lean-laguna bench [options]

Run the same prompts without a drafter and with one, interleaved; compare speed and every output.
Exit status 1 if an output differs.

  --demo, --profile         a short run that shows the text first; where a decode step's time goes
  --model NAME, --drafter NAME   nano, a folder, a downloaded repository; auto, or a name
  --num-speculative-tokens  draft tokens per step, or auto; --speculative-config JSON as vLLM has it
  --base-url URL            ask a server, drafting and not; --base-url-b URL: that one against this
  --api-key KEY             for them; else LEAN_LAGUNA_API_KEY or OPENAI_API_KEY
  --prompts SET             mixed (14, easy to hard), trivial (20), or a .jsonl or text file
  --num-prompts N           only N of them, spread over the set
  --repeats 3, --warmup 1   measured passes, and generations per side before them
  --out FILE, --html FILE, --json   a result file, a page with charts, one line of JSON and no more
sampling, with vLLM's names; greedy and 256 tokens unless given:
  --temperature T --top-p P --top-k K --min-p P --seed S --max-tokens N --structured-outputs JSON
  --min-tokens N --ignore-eos --repetition-penalty R --presence-penalty P --frequency-penalty F
  --thinking-token-budget N --logit-bias ID=B... --stop TEXT... --stop-token-ids ID... --logprobs N
  --bad-words TEXT... --allowed-token-ids ID... --prompt-logprobs N --include-stop-str-in-output
  --keep-special-tokens
engine: --device cpu|cuda --dtype bfloat16 --threads N --max-model-len N --attention-factor X
  --kernels triton|cuda --load-format dummy --shape laguna-xs --scheme nvfp4 --kv-cache-dtype fp8

example: lean-laguna bench --num-speculative-tokens 7 --html bench.html
"""


def build_parser() -> Parser:
    """Return the command's parser."""
    parser = Parser("lean-laguna bench", HELP)
    parser.add_argument("--demo", action="store_true")
    parser.add_argument("--profile", action="store_true")
    add_model_options(parser)
    add_dummy_options(parser)
    add_draft_length_option(parser)
    add_plan_options(parser, repeats=REPEATS)
    parser.set_defaults(repeats=None)  # with --demo fewer, unless they are given
    add_sampling_options(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Run the A/B; returns 1 where an output differs.

    Raises:
        LeanLagunaError: A mistake in the call or its input.
    """
    if args.profile:
        from lean_laguna.cli.profile import run_profile

        return run_profile(args)
    if args.demo:
        args.max_tokens = args.max_tokens or DEMO_MAX_TOKENS
        args.num_prompts = args.num_prompts or DEMO_NUM_PROMPTS
    args.repeats = args.repeats or (DEMO_REPEATS if args.demo else REPEATS)
    plan = make_plan(args)
    from lean_laguna.bench.ab import BASELINE, SPECULATIVE, run_ab
    from lean_laguna.bench.report import ab_report, heading
    from lean_laguna.bench.results import describe
    from lean_laguna.cli.terminal import Terminal

    terminal = Terminal(is_json=args.json)
    with two_sides(args, plan) as (baseline, drafting):
        if args.demo:
            from lean_laguna.backends.local import LocalBackend
            from lean_laguna.cli.demo import show_text

            assert isinstance(baseline, LocalBackend)
            assert isinstance(drafting, LocalBackend)
            show_text(baseline, drafting, plan, terminal)
        with terminal.progress() as progress:
            result = run_ab(baseline, drafting, plan, progress)
        engines = {BASELINE: baseline.info(), SPECULATIVE: drafting.info()}
    content = describe("ab", plan, result.to_dict(), engines=engines)
    terminal.report(heading(content))
    terminal.report(ab_report(content, per_prompt=not args.demo))
    if args.demo:
        from lean_laguna.cli.demo import show_next

        show_next(terminal)
    write_files(args, content, terminal)
    terminal.json_line(content)
    # Where drafts stand by a draw, outputs differ by design.
    return 1 if result.num_mismatches and not args.synthetic else 0
