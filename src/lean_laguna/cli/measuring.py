"""What bench, sweep and parity share: the plan, the two sides, and the files they write."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lean_laguna.cli.options import (
    drafter_name,
    engine_options,
    given_sampling,
    is_dummy,
    require_models,
    sampling_params,
    set_threads,
)
from lean_laguna.cli.parser import Parser, whole
from lean_laguna.cli.remote import add_remote_options, check_remote, remote_sides
from lean_laguna.core import heap
from lean_laguna.core.errors import RequestError
from lean_laguna.core.files import atomic_write_json, atomic_write_text, require_writable
from lean_laguna.tasks.prompts import load_prompts

if TYPE_CHECKING:
    from lean_laguna.backends.http import HttpBackend
    from lean_laguna.backends.local import LocalBackend
    from lean_laguna.bench.rounds import Plan
    from lean_laguna.cli.terminal import Terminal

    Side = LocalBackend | HttpBackend

# Greedy and 256 tokens: what the published comparisons use.
DEFAULTS = {"temperature": 0.0, "max_tokens": 256}


def add_plan_options(parser: Parser, *, repeats: int | None) -> None:
    """Add the prompts, the repeats and the files to write.

    Args:
        parser: Of the command.
        repeats: As many unless given; None where the command has no repeats.
    """
    parser.add_argument("--prompts", default="mixed")
    parser.add_argument("--num-prompts", type=whole(1))
    if repeats is not None:
        parser.add_argument("--repeats", type=whole(1), default=repeats)
        parser.add_argument("--warmup", type=whole(0), default=1)
    add_remote_options(parser)
    parser.add_argument("--out")
    parser.add_argument("--html")
    parser.add_argument("--json", action="store_true")


def make_plan(args: argparse.Namespace) -> Plan:
    """Return what is to be run.

    Raises:
        LeanLagunaError: The prompts cannot be read, a sampling value is out of range, or an output file could
            not be written.
    """
    from lean_laguna.bench.rounds import Plan

    check_remote(args)
    for name in ("out", "html", "svg"):
        if getattr(args, name, None) is not None:
            require_writable(getattr(args, name))
    given = given_sampling(args)
    seed = given.pop("seed", 0)
    return Plan(
        prompts=load_prompts(args.prompts).first(args.num_prompts),
        params=sampling_params(given, DEFAULTS),
        repeats=getattr(args, "repeats", 1),
        warmup=getattr(args, "warmup", 0),
        seed=seed,
    )


@contextlib.contextmanager
def two_sides(args: argparse.Namespace, plan: Plan) -> Iterator[tuple[Side, Side]]:
    """Yield the side without a drafter and the one with it: two engines, or servers that are asked.

    Raises:
        LeanLagunaError: A model is missing or damaged, a server cannot be asked, or a prompt does not fit.
    """
    if args.base_url is not None:
        with remote_sides(args, plan) as sides:
            yield sides
    else:
        yield from _engines(args, plan)


def _engines(args: argparse.Namespace, plan: Plan) -> Iterator[tuple[Side, Side]]:
    """Load the target once and yield an engine without a drafter and one with it.

    The prefix cache is off: a repeat would otherwise find its own prompt in it.
    """
    drafter = drafter_name(args, is_required=True)
    if not is_dummy(args):
        require_models(args.model, drafter)
    options = engine_options(args)
    from lean_laguna.backends.local import LocalBackend

    drafting = LocalBackend.load(
        args.model,
        drafter,
        num_speculative_tokens=getattr(args, "num_speculative_tokens", "auto"),
        max_num_seqs=1,
        enable_prefix_caching=False,
        synthetic={**args.synthetic, **args.drafter_options},
        **options,
    )
    _check_prompts(drafting, plan)
    baseline = drafting.without_drafter()
    set_threads(args, drafting.llm)
    heap.settle()
    yield baseline, drafting
    baseline.close()
    drafting.close()


def draft_lengths(given: list[int] | None, usual: tuple[int, ...], backend: Side) -> list[int]:
    """Return the draft lengths to run: as given, or the usual ones that this drafter can draft.

    Raises:
        ConfigError: A given length is beyond the drafter.
    """
    if given is None:
        return [length for length in usual if length <= backend.max_draft_tokens]
    for length in given:
        backend.with_draft_length(length)
    return given


def write_files(args: argparse.Namespace, content: dict[str, Any], terminal: Terminal) -> None:
    """Write the result file, the page and the chart that were asked for."""
    from lean_laguna.bench import report

    if args.out is not None:
        atomic_write_json(args.out, content)
        terminal.note(f"result: {args.out}")
    if args.html:
        atomic_write_text(args.html, report.to_html(content))
        terminal.note(f"page: {args.html}")
    if getattr(args, "svg", None):
        atomic_write_text(args.svg, report.sweep_svg(content) + "\n")
        terminal.note(f"chart: {args.svg}")


def _check_prompts(backend: LocalBackend, plan: Plan) -> None:
    """Refuse a prompt that does not fit before anything has been run."""
    limit = backend.llm.engine.max_model_len
    for prompt in plan.prompts.prompts:
        num_tokens = len(backend.llm.tokenizer.encode(prompt.prompt))
        if num_tokens + (plan.params.max_tokens or 1) > limit:
            raise RequestError(
                f"prompt '{prompt.id}' has {num_tokens} tokens; with {plan.params.max_tokens} of output "
                f"that is beyond the context of {limit}; lower --max-tokens or use a shorter prompt",
                param="prompt",
                code="context_length_exceeded",
            )
