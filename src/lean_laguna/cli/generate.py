"""``lean-laguna generate``: continue a prompt, streaming."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lean_laguna.cli.options import (
    add_draft_length_option,
    add_model_options,
    add_sampling_options,
    drafter_name,
    engine_options,
    given_sampling,
    require_models,
    sampling_params,
    set_threads,
)
from lean_laguna.cli.parser import Parser, one_of
from lean_laguna.cli.remote import add_remote_options, check_remote
from lean_laguna.core.errors import ConfigError
from lean_laguna.core.files import require_writable

if TYPE_CHECKING:
    from lean_laguna.core.types import RequestOutput, SamplingParams
    from lean_laguna.engine.llm import LLM

DEFAULT_MAX_TOKENS = 256
HELP = """\
usage: lean-laguna generate [PROMPT] [options]

Continue a prompt, printing text as it comes. PROMPT - or none at all reads standard input.

  --file PATH               read the prompt from a file
  --chat, --system TEXT     the prompt is a user's message, through the model's chat template
  --model NAME, --drafter NAME   nano, a folder, a downloaded repository; auto, none, or a name
  --base-url URL            ask a server instead; --api-key KEY, else LEAN_LAGUNA_API_KEY
  --num-speculative-tokens  draft tokens per step, or auto; 0 is off
  --draft-profile FILE      keep what auto learned on this machine, and start from it next time
  --speculative-config JSON both at once, as vLLM writes it
  --show-drafts             colour the tokens that came from accepted drafts
  --color WHEN              auto, always, never
  --json                    one line of JSON last, and nothing else on standard output
sampling, with vLLM's names; defaults come from the checkpoint, else greedy:
  --temperature T  --top-p P  --top-k K  --min-p P  --seed S  -n, --n COUNT  --ignore-eos
  --max-tokens 256  --min-tokens N  --stop TEXT...  --stop-token-ids ID...  --bad-words TEXT...
  --repetition-penalty R  --presence-penalty P  --frequency-penalty F  --logit-bias ID=BIAS...
  --logprobs N  --prompt-logprobs N  --include-stop-str-in-output  --keep-special-tokens
  --thinking-token-budget N  --structured-outputs '{"regex": "[0-9]+"}'  --allowed-token-ids ID...
engine: --device auto|cpu|cuda  --dtype auto|float32|bfloat16  --threads N  --max-model-len N
  --attention-factor X  --kv-cache-dtype auto|fp8

example: lean-laguna generate 'def fib(n):' --show-drafts --max-tokens 100
"""


def build_parser() -> Parser:
    """Return the command's parser."""
    parser = Parser("lean-laguna generate", HELP)
    parser.add_argument("prompt", nargs="*")
    parser.add_argument("--file")
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--system")
    parser.add_argument("-n", "--n", type=int)
    parser.add_argument("--draft-profile", type=Path)
    parser.add_argument("--show-drafts", action="store_true")
    parser.add_argument("--color", type=one_of("auto", "always", "never"), default="auto")
    parser.add_argument("--json", action="store_true")
    add_model_options(parser)
    add_remote_options(parser, is_pair=False)
    add_draft_length_option(parser)
    add_sampling_options(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Generate and print; returns the exit status.

    Raises:
        LeanLagunaError: A mistake in the call or its input.
    """
    from lean_laguna.cli.terminal import Terminal

    check_remote(args)
    prompt = read_prompt(args)
    given = given_sampling(args) | ({"n": args.n} if args.n is not None else {})
    sampling_params(given, {})  # mistakes answer at once, before anything is loaded
    if args.base_url is not None:
        from lean_laguna.cli.generate_remote import run_remote

        return run_remote(args, prompt, given)
    if args.draft_profile is not None:
        require_writable(args.draft_profile)
    llm = _load(args)
    if args.draft_profile is not None:
        _open_profile(llm, args.draft_profile)
    text = _render(llm, prompt, args) if args.chat else prompt
    params = sampling_params(given, _defaults(llm, text))
    terminal = Terminal(is_json=args.json, color=args.color)
    output = _stream(llm, text, params, args, terminal)
    if args.draft_profile is not None and llm.engine.controller is not None:
        from lean_laguna.spec.draft_profile import save_profile

        save_profile(llm.engine.controller.to_dict(), args.draft_profile)
    terminal.note(_summary(llm, output, params))
    terminal.json_line(to_json(output))
    return 0


def read_prompt(args: argparse.Namespace) -> str:
    """Return the prompt from the argument, a file or standard input.

    Raises:
        ConfigError: None of them, two of them, or a file that cannot be read.
    """
    if len(args.prompt) > 1:
        raise ConfigError(f"the prompt must be one argument, found {len(args.prompt)}; put it in quotes")
    if args.system is not None and not args.chat:
        raise ConfigError("--system needs --chat")
    if args.file is not None:
        if args.prompt:
            raise ConfigError("the prompt was given twice: as an argument and with --file")
        try:
            return Path(args.file).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--file {args.file}: cannot be read: {error.strerror or error}") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"--file {args.file}: not UTF-8 text: {error}") from None
    if args.prompt and args.prompt[0] != "-":
        return str(args.prompt[0])
    if not args.prompt and sys.stdin.isatty():
        raise ConfigError("no prompt: give it as an argument, with --file, or on standard input")
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is not UTF-8 text: {error}") from None


def _load(args: argparse.Namespace) -> LLM:
    drafter = drafter_name(args, is_required=False)
    require_models(args.model, drafter)
    options = engine_options(args)
    if drafter is not None and args.num_speculative_tokens != 0:
        options["speculative_config"] = {
            "model": drafter,
            "num_speculative_tokens": args.num_speculative_tokens,
            **args.synthetic,
            **args.drafter_options,
        }
    from lean_laguna.engine.llm import LLM

    llm = LLM(args.model, **options)
    set_threads(args, llm)
    return llm


def _open_profile(llm: LLM, path: Path) -> None:
    """Give the engine's choice of draft lengths what an earlier run learned, where there is such a file."""
    from lean_laguna.spec.draft_profile import load_profile

    if llm.engine.controller is None:
        raise ConfigError("--draft-profile: there is no drafter whose draft length could be chosen")
    if path.exists():
        llm.engine.controller.restore(load_profile(path))


def _defaults(llm: LLM, text: str) -> dict[str, Any]:
    """Return what holds where nothing was asked for; the usual length gives way to a shorter context."""
    recommended = llm.generation_config.sampling_defaults()
    room = llm.engine.max_model_len - len(llm.tokenizer.encode(text))
    return {"temperature": 0.0, **recommended, "max_tokens": max(1, min(DEFAULT_MAX_TOKENS, room))}


def _render(llm: LLM, prompt: str, args: argparse.Namespace) -> str:
    messages = [{"role": "system", "content": args.system}] if args.system is not None else []
    return llm.chat_template.render([*messages, {"role": "user", "content": prompt}])


def _stream(
    llm: LLM, text: str, params: SamplingParams, args: argparse.Namespace, terminal: Any
) -> RequestOutput:
    from rich.text import Text

    from lean_laguna.cli.drafts import StreamPrinter, harmless

    printer = StreamPrinter(terminal.out, llm.tokenizer, params, show_drafts=args.show_drafts)
    last: RequestOutput | None = None
    if terminal.out.is_terminal and params.n == 1 and not args.chat:
        terminal.out.print(Text(harmless(text), style="dim"), end="", soft_wrap=True)
    for output in llm.stream(text, params):
        last = output
        if params.n == 1:
            printer.show(output.outputs[0])
    assert last is not None
    if params.n > 1:  # several completions at once would be interleaved on the screen
        for completion in last.outputs:
            terminal.out.print(f"--- completion {completion.index + 1} of {params.n}", highlight=False)
            StreamPrinter(terminal.out, llm.tokenizer, params, show_drafts=args.show_drafts).show(completion)
            terminal.out.print()
    else:
        terminal.out.print()
    return last


def _summary(llm: LLM, output: RequestOutput, params: SamplingParams) -> str:
    from lean_laguna.cli.drafts import acceptance_text
    from lean_laguna.core.types import SpeculationStats

    num_tokens = sum(len(c.token_ids) for c in output.outputs)
    parts = [f"{num_tokens} tokens ({', '.join(str(c.finish_reason) for c in output.outputs)})"]
    times = output.times
    if times.first_token_s is not None and times.last_token_s is not None:
        parts.append(f"first after {1000 * (times.first_token_s - times.arrival_s):.0f} ms")
        if num_tokens > params.n and times.last_token_s > times.first_token_s:
            rate = (num_tokens - params.n) / (times.last_token_s - times.first_token_s)
            parts.append(f"then {rate:.1f} tok/s")
    stats = sum((c.speculation for c in output.outputs if c.speculation is not None), SpeculationStats())
    if (brought := acceptance_text(stats)) is not None:
        parts.append(brought)
    mode = (
        "greedy" if params.is_greedy else f"temperature {params.temperature:g}, seed {output.outputs[0].seed}"
    )
    parts.append(mode)
    reason = llm.stats().draft_length_reason
    return "[" + " · ".join(parts) + (f" · {reason}" if reason else "") + "]"


def to_json(output: RequestOutput) -> dict[str, Any]:
    """Return what ``--json`` prints."""
    times = output.times
    line: dict[str, Any] = {
        "prompt": output.prompt,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_cached_tokens": output.num_cached_tokens,
        "outputs": [_completion_json(completion) for completion in output.outputs],
    }
    if times.first_token_s is not None and times.last_token_s is not None:
        line["ttft_s"] = times.first_token_s - times.arrival_s
        line["decode_s"] = times.last_token_s - times.first_token_s
    if output.prompt_logprobs is not None:
        line["prompt_logprobs"] = [_logprobs_json(entry) for entry in output.prompt_logprobs]
    return line


def _completion_json(completion: Any) -> dict[str, Any]:
    content: dict[str, Any] = {
        "index": completion.index,
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "seed": completion.seed,
    }
    if completion.logprobs is not None:
        content["logprobs"] = [_logprobs_json(entry) for entry in completion.logprobs]
        content["cumulative_logprob"] = completion.cumulative_logprob
    stats = completion.speculation
    if stats is not None:
        content["is_draft_token"] = list(completion.is_draft_token)
        content["speculative_decoding"] = {
            "mean_acceptance_length": stats.mean_acceptance_length,
            "draft_acceptance_rate": stats.draft_acceptance_rate,
            "num_drafts": stats.num_drafts,
            "num_draft_tokens": stats.num_draft_tokens,
            "num_accepted_tokens": stats.num_accepted_tokens,
            "num_accepted_tokens_per_pos": list(stats.num_accepted_tokens_per_pos),
        }
    return content


def _logprobs_json(entry: Any) -> dict[str, Any] | None:
    if entry is None:
        return None
    # JSON has no infinity; a token that cannot be drawn has no log-probability
    return {
        str(token): {
            "logprob": value.logprob if value.logprob > float("-inf") else None,
            "rank": value.rank,
            "decoded_token": value.decoded_token,
        }
        for token, value in entry.items()
    }
