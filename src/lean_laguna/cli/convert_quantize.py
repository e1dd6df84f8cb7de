"""``lean-laguna convert quantize``: weights in 4 or 8 bits, without data, and what that costs."""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lean_laguna.cli.parser import Parser, one_of, whole
from lean_laguna.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from lean_laguna.cli.terminal import Terminal
    from lean_laguna.convert.source import Source
    from lean_laguna.quant.scheme import WeightScheme

_MAX_WORKERS = 64
# Threads: a GPU encodes, they read and write.
_GPU_WORKERS = 4
_MB = 1_000_000
HELP = """\
usage: lean-laguna convert quantize SOURCE DESTINATION --scheme NAME [options]

Store the weights of a target or a drafter in 4 or 8 bits, as compressed-tensors and vLLM read them.
Needs no data and little memory; all else is copied byte for byte. After a kill the same command
goes on. Exit status 1 where --like finds differing bytes.

  --scheme NAME             nvfp4, fp8-block, fp8-channel, int8, int4; int4:32 has groups of 32
  --modules A+B             experts (routed and shared; usual), attention, dense, gates, head, fc,
                            all (everything but norms, router, embeddings; usual for drafters)
  --rule PATTERN=NAME       goes before --modules, repeatable: a word as above, a linear's name or
                            re:EXPRESSION, and a scheme or keep
  --group-size N            of int4 (128) and int8 (a scale per row)
  --like DIR                as DIR stores the same linears; with --modules, as it stores experts.
                            First makes DIR's own weights again and counts differing bytes
  --like-source DIR         what DIR was made from, where SOURCE is not it
  --check                   errors of the weights; --text FILE: perplexity and greedy agreement, on
                            --max-text-tokens N (4096); for a drafter, --target NAME: acceptance on
                            --prompts SET (mixed)
  --device auto|cpu|cuda    where weights are encoded, to the same bytes, and checked
  --workers N, --json       processes (one per CPU, up to 16); one JSON line last, alone on stdout

example: lean-laguna convert quantize nano nano-nvfp4 --scheme nvfp4 --check
"""


def build_parser() -> Parser:
    """Return the command's parser."""
    parser = Parser("lean-laguna convert quantize", HELP)
    parser.add_argument("source", nargs="?")
    parser.add_argument("destination", nargs="?", type=Path)
    parser.add_argument("--scheme")
    parser.add_argument("--modules")
    parser.add_argument("--rule", action="append", default=[])
    parser.add_argument("--group-size", type=whole(1))
    parser.add_argument("--like")
    parser.add_argument("--like-source")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--max-text-tokens", type=whole(2), default=4096)
    parser.add_argument("--target")
    parser.add_argument("--prompts", default="mixed")
    parser.add_argument("--device", type=one_of("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--workers", type=whole(1, _MAX_WORKERS))
    parser.add_argument("--json", action="store_true")
    return parser


def run(args: argparse.Namespace) -> int:
    """Quantise; returns 1 where ``--like`` finds differing bytes.

    Raises:
        LeanLagunaError: A mistake in the call or its input.
    """
    _check_words(args)
    from lean_laguna.cli.quantize_report import describe, print_table
    from lean_laguna.cli.terminal import Terminal
    from lean_laguna.convert.quantize import default_workers, quantize
    from lean_laguna.convert.source import open_source
    from lean_laguna.convert.vllm_limits import vllm_limits
    from lean_laguna.engine.loading import resolve_device
    from lean_laguna.models.catalog import resolve_model

    terminal = Terminal(is_json=args.json)
    source = open_source(resolve_model(args.source))
    text = _text(args, source)
    device = resolve_device(args.device)
    workers = args.workers or (default_workers(source) if device.type == "cpu" else _GPU_WORKERS)
    report: dict[str, Any] = {"source": str(source.path), "destination": str(args.destination)}
    schemes, shares_divisors, status = _choose(args, source, workers, terminal, report)
    report["vllm_limits"] = vllm_limits(source, schemes)
    for limit in report["vllm_limits"]:
        terminal.note(limit)
    started, cpu_started = time.monotonic(), time.process_time()
    with terminal.progress() as show:
        result = quantize(
            source,
            args.destination,
            schemes,
            num_workers=workers,
            is_checked=args.check,
            shares_divisors=shares_divisors,
            device=device,
            progress=show and (lambda done, total, file: show(done // _MB, total // _MB, f"MB, {file}")),
        )
    cpu_s = time.process_time() - cpu_started + result.workers_cpu_s
    report |= {"num_workers": workers, "conversion_s": time.monotonic() - started, "cpu_s": cpu_s}
    report |= describe(result, schemes, source)
    print_table(report, terminal)
    if args.check:
        report["errors"] = {module: error.relative for module, error in result.errors.items()}
        report |= _quality(args, source, text, terminal)
    terminal.json_line(report)
    return status


def _check_words(args: argparse.Namespace) -> None:
    if args.source is None or args.destination is None:
        raise ConfigError("convert quantize needs a source and a destination folder")
    if args.like is None and args.scheme is None and not args.rule:
        raise ConfigError("convert quantize needs --scheme, --rule or --like")
    if args.like is not None and (args.scheme or args.rule or args.group_size):
        raise ConfigError("--like takes the scheme from a checkpoint; leave out --scheme and --rule")
    if args.like_source is not None and args.like is None:
        raise ConfigError("--like-source needs --like")
    if (args.text or args.target) and not args.check:
        raise ConfigError("--text and --target need --check")
    if args.modules is not None and args.scheme is None and args.like is None:
        raise ConfigError("--modules needs --scheme or --like")


def _text(args: argparse.Namespace, source: Source) -> str | None:
    """Return the text to check on, read before any work is done."""
    if source.is_drafter and args.text:
        raise ConfigError(f"{source.path} is a drafter: check it with --target, not with --text")
    if not source.is_drafter and args.target:
        raise ConfigError(f"{source.path} is a target: check it with --text, not with --target")
    if args.text is None:
        return None
    try:
        return str(args.text.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--text {args.text}: cannot be read as UTF-8 text: {error}") from None


def _choose(
    args: argparse.Namespace, source: Source, workers: int, terminal: Terminal, report: dict[str, Any]
) -> tuple[dict[str, WeightScheme], bool, int]:
    """Return the schemes, whether fused linears share divisors, and the exit status of the proof."""
    from lean_laguna.convert.quantize_plan import Rule, group_rules, make_plan, parse_scheme

    if args.like is not None:
        return _like(args, source, workers, terminal, report)
    rules = []
    for text in args.rule:
        pattern, equals, word = text.rpartition("=")
        if not equals or not pattern:
            raise ConfigError(f"--rule {text!r}: expected PATTERN=SCHEME, such as re:.*o_proj=int8")
        rules.append(Rule(pattern, None if word == "keep" else parse_scheme(word, args.group_size)))
    if args.scheme is not None:
        words = args.modules or ("all" if source.is_drafter else "experts")
        rules += group_rules(words, parse_scheme(args.scheme, args.group_size))
    return make_plan(source, rules), True, 0


def _like(
    args: argparse.Namespace, source: Source, workers: int, terminal: Terminal, report: dict[str, Any]
) -> tuple[dict[str, WeightScheme], bool, int]:
    from lean_laguna.convert.quantize_plan import group_rules, like_schemes, make_plan, scheme_of_class
    from lean_laguna.convert.quantize_proof import prove
    from lean_laguna.convert.source import open_source
    from lean_laguna.models.catalog import resolve_model

    model = open_source(resolve_model(args.like))
    if args.modules is not None:
        schemes = make_plan(source, group_rules(args.modules, scheme_of_class(model, "experts")))
    else:
        schemes, notes = like_schemes(source, model)
        for note in notes:
            terminal.note(note)
    original = source if args.like_source is None else open_source(resolve_model(args.like_source))
    proof = prove(original, model, num_workers=workers)
    report["proof"] = dataclasses.asdict(proof)
    terminal.report(
        f"{proof.num_differing_bytes:,} of {proof.num_bytes:,} bytes differ in {proof.num_modules:,} linears "
        f"of {model.path}, made again from {original.path}"
    )
    if proof.differing_modules:
        terminal.note(
            f"{len(proof.differing_modules)} linears differ, such as {proof.differing_modules[0]}: they were "
            "made from other weights, or with data"
        )
    return schemes, proof.has_shared_divisors, 1 if proof.num_differing_bytes else 0


def _quality(
    args: argparse.Namespace, source: Source, text: str | None, terminal: Terminal
) -> dict[str, Any]:
    if text is not None:
        return {"text": _on_text(args, source, text, terminal)}
    if args.target is not None:
        return {"acceptance": _acceptance(args, source, terminal)}
    more = "--target NAME compares acceptance" if source.is_drafter else "--text FILE compares perplexity"
    terminal.note(f"only the weights were compared: {more} too")
    return {}


def _on_text(args: argparse.Namespace, source: Source, text: str, terminal: Terminal) -> dict[str, Any]:
    from lean_laguna.convert.quality import compare_on_text
    from lean_laguna.engine.loading import resolve_device, resolve_dtype

    device = resolve_device(args.device)
    with terminal.progress() as show:
        found = compare_on_text(
            source.path,
            args.destination,
            text,
            device=device,
            dtype=resolve_dtype("auto", device),
            max_tokens=args.max_text_tokens,
            progress=show,
        )
    change = found.perplexity_after / found.perplexity_before - 1
    terminal.report(
        f"perplexity {found.perplexity_before:.3f} became {found.perplexity_after:.3f} ({change:+.2%}), and "
        f"the likeliest token is the same at {found.greedy_agreement:.1%} of {found.num_tokens:,} positions"
    )
    return dataclasses.asdict(found)


def _acceptance(args: argparse.Namespace, source: Source, terminal: Terminal) -> dict[str, Any]:
    from lean_laguna.convert.quality import compare_acceptance
    from lean_laguna.tasks.prompts import load_prompts

    prompts = [prompt.prompt for prompt in load_prompts(args.prompts).prompts]
    with terminal.progress() as show:
        found = compare_acceptance(
            args.target, source.path, args.destination, prompts, device=args.device, progress=show
        )
    before, after = found.acceptance_length_before or 1, found.acceptance_length_after or 1
    terminal.report(
        f"mean acceptance length {before:.3f} became {after:.3f} ({after / before - 1:+.1%}), greedy, "
        f"{found.num_speculative_tokens} drafts a step, {found.num_prompts} prompts"
    )
    return dataclasses.asdict(found)
