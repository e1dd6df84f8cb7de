"""``lean-laguna serve``: the model over HTTP, for every client that speaks to OpenAI or to vLLM."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lean_laguna.cli.options import (
    AUTO,
    add_draft_length_option,
    add_dummy_options,
    drafter_name,
    is_dummy,
    require_models,
    set_threads,
)
from lean_laguna.cli.options import engine_options as shared_options
from lean_laguna.cli.parser import Parser, one_of, whole
from lean_laguna.cli.serve_flags import add_accepted_options, in_our_names, refuse_unsupported
from lean_laguna.core.errors import ConfigError, RequestError
from lean_laguna.core.files import parse_json
from lean_laguna.models.catalog import DEFAULT_MODEL

if TYPE_CHECKING:
    from lean_laguna.engine.llm import LLM
    from lean_laguna.server.settings import ServerConfig

HELP = """\
usage: lean-laguna serve [MODEL] [options]

Serve nano, a folder or a downloaded repository over HTTP, for clients of OpenAI's API and vLLM's.

  --model NAME  --host 127.0.0.1  --port 8000     what and where; port 0 takes any free one
  --served-model-name NAME...  --api-key KEY...  --allowed-origins ORIGIN...  (no key, no origin)
  --speculative-config JSON  (or --drafter auto|none|NAME  --num-speculative-tokens auto|N)
  --reasoning-parser, --tool-call-parser          auto, poolside_v1 or none
  --default-chat-template-kwargs JSON  --override-generation-config JSON
  --per-request-spec-decode-metrics summary|detailed|none    its speculation, in each response
  --unknown-fields refuse|ignore  --enable-admin  body fields nobody knows; new weights, pause
limits: --max-model-len N  --max-num-seqs 16  --max-num-batched-tokens 256  --max-queued-seqs 256
  --max-request-bytes N  --kv-cache-memory-bytes N  --block-size 16  --shutdown-timeout 30
engine: --device auto|cpu|cuda  --dtype auto|float32|bfloat16  --threads N  --attention-factor X
  --kernels auto|torch|triton|cuda  --load-format auto|dummy  --shape laguna-xs  --seed N
  --scheme nvfp4 (of dummy weights)  --kv-cache-dtype auto|fp8 (half the cache)
  --enable-prefix-caching | --no-enable-prefix-caching        log: --log-level warning  --access-log
taken where it says what is so: --trust-remote-code --enforce-eager --enable-auto-tool-choice
  --disable-log-requests --disable-log-stats --enable-chunked-prefill --enable-prompt-tokens-details
  --tensor-parallel-size --pipeline-parallel-size --data-parallel-size --moe-backend --spec-type
  --generation-config --gpu-memory-utilization --mem-fraction-static --speculative-algorithm
  --reasoning-format --reasoning-budget

example: lean-laguna serve nano --port 8000
"""
_PARSERS = (AUTO, "poolside_v1", "none")
_LEVELS = ("debug", "info", "warning", "error", "critical")


class ServeParser(Parser):
    """Also takes other servers' names for our flags."""

    def parse_strictly(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse ``argv``, as `Parser.parse_strictly` does."""
        return super().parse_strictly(in_our_names(argv))


def build_parser() -> Parser:
    """Return the command's parser."""
    parser = ServeParser("lean-laguna serve", HELP)
    parser.add_argument("model", nargs="?", default=None)
    parser.add_argument("--model", dest="model_flag", default=None)
    parser.add_argument("--drafter", default=AUTO)
    add_draft_length_option(parser)
    _add_http_options(parser)
    _add_engine_options(parser)
    add_dummy_options(parser)
    add_accepted_options(parser)
    return parser


def _add_http_options(parser: Parser) -> None:
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=whole(0, 65535), default=8000)
    parser.add_argument("--api-key", nargs="+", action="extend")
    parser.add_argument("--allowed-origins", nargs="+", action="extend")
    parser.add_argument("--served-model-name", nargs="+", action="extend")
    parser.add_argument("--reasoning-parser", type=one_of(*_PARSERS), default=AUTO)
    parser.add_argument("--tool-call-parser", type=one_of(*_PARSERS), default=AUTO)
    parser.add_argument("--default-chat-template-kwargs")
    parser.add_argument("--override-generation-config")
    metrics = one_of("none", "summary", "detailed")
    parser.add_argument("--per-request-spec-decode-metrics", type=metrics, default="summary")
    parser.add_argument("--unknown-fields", type=one_of("refuse", "ignore"), default="refuse")
    parser.add_argument("--enable-admin", action="store_true")
    parser.add_argument("--max-queued-seqs", type=whole(0), default=256)
    parser.add_argument("--max-request-bytes", type=whole(1), default=32 << 20)
    parser.add_argument("--shutdown-timeout", type=whole(0, 86400), default=30)
    parser.add_argument("--log-level", type=one_of(*_LEVELS), default="warning")
    parser.add_argument("--access-log", action="store_true")


def _add_engine_options(parser: Parser) -> None:
    parser.add_argument("--device", type=one_of("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", type=one_of("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--threads", type=whole(1, 1024))
    parser.add_argument("--attention-factor", type=float)
    parser.add_argument("--kv-cache-dtype", type=one_of("auto", "fp8"), default="auto")
    for name in ("--max-model-len", "--max-num-seqs", "--max-num-batched-tokens", "--block-size"):
        parser.add_argument(name, type=whole(1))
    parser.add_argument("--kv-cache-memory-bytes", type=whole(1))
    parser.add_argument("--seed", type=whole(0))
    parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop; returns the exit status.

    Raises:
        LeanLagunaError: A mistake in the call, or a model that cannot be loaded.
    """
    if args.model is not None and args.model_flag is not None:
        raise ConfigError("the model was given twice: as an argument and with --model")
    args.model = args.model or args.model_flag or DEFAULT_MODEL
    refuse_unsupported(args)
    drafter = drafter_name(args, is_required=False)
    if not is_dummy(args):
        require_models(args.model, drafter)
    config = server_config(args)
    options = engine_options(args, drafter)
    from lean_laguna.server.listener import bind

    listener = bind(args.host, args.port)
    address = _address(args.host, listener.getsockname()[1])
    _say(f"listening on {address}, loading {args.model}")
    from lean_laguna.server.run import serve

    def load() -> LLM:
        from lean_laguna.engine.llm import LLM

        llm = LLM(args.model, **options)
        set_threads(args, llm)
        if not is_dummy(args):
            _ = llm.chat_template  # one that does not compile is known now, not at the first request
        return llm

    def ready(service: Any) -> None:
        from lean_laguna.server.summary import summary

        _say(f"ready on {address}: {summary(service.llm, config)}")

    serve(config, load, listener, ready, log_level=args.log_level, has_access_log=args.access_log)
    return 0


def server_config(args: argparse.Namespace) -> ServerConfig:
    """Return the HTTP side's configuration.

    Raises:
        ConfigError: A JSON option is malformed or holds an unknown key, or an API key is empty.
    """
    from lean_laguna.server.settings import ServerConfig

    if "" in (args.api_key or ()):  # of a shell's unset variable: it would let everybody in
        raise ConfigError("--api-key: a key must not be empty; leave the flag out to ask for none")
    key = os.environ.get("LEAN_LAGUNA_API_KEY")
    return ServerConfig(
        served_model_names=tuple(args.served_model_name or (args.model,)),
        api_keys=tuple(args.api_key or ((key,) if key else ())),
        allowed_origins=tuple(args.allowed_origins or ()),
        max_request_bytes=args.max_request_bytes,
        max_queued_seqs=args.max_queued_seqs,
        shutdown_timeout_s=args.shutdown_timeout,
        enable_admin=args.enable_admin,
        unknown_fields=args.unknown_fields,
        spec_decode_metrics=args.per_request_spec_decode_metrics,
        default_chat_template_kwargs=_template_kwargs(args.default_chat_template_kwargs),
        override_generation_config=_sampling_defaults(args.override_generation_config),
        reasoning_parser=args.reasoning_parser,
        tool_call_parser=args.tool_call_parser,
    )


def engine_options(args: argparse.Namespace, drafter: str | None) -> dict[str, Any]:
    """Return the options of ``LLM`` that the command line sets."""
    names = {
        "max_num_seqs": args.max_num_seqs,
        "prefill_chunk_size": args.max_num_batched_tokens,
        "kv_block_size": args.block_size,
        "kv_cache_memory_bytes": args.kv_cache_memory_bytes,
        "seed": args.seed,
    }
    options = {name: value for name, value in names.items() if value is not None}
    options |= {**shared_options(args), "enable_prefix_caching": args.enable_prefix_caching}
    if drafter is not None and args.num_speculative_tokens != 0:
        options["speculative_config"] = {
            "model": drafter,
            "num_speculative_tokens": args.num_speculative_tokens,
            **args.synthetic,
            **args.drafter_options,
        }
    return options


def _json_object(text: str | None, flag: str) -> Mapping[str, Any]:
    if text is None:
        return {}
    try:
        value = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: not valid JSON ({error}); found {text!r:.200}") from None
    if not isinstance(value, dict):
        raise ConfigError(f'{flag}: must be a JSON object such as {{"key": 1}}, found {text!r:.200}')
    return value


def _template_kwargs(text: str | None) -> Mapping[str, Any]:
    """Return template arguments, checked as a request's would be."""
    if text is None:
        return {}
    from lean_laguna.server.conversation import RESERVED_KWARGS

    flag = "--default-chat-template-kwargs"
    given = _json_object(text, flag)
    for key in sorted(given.keys() & set(RESERVED_KWARGS)):
        raise ConfigError(f"{flag}: must not set '{key}', which each request says for itself")
    return given


def _sampling_defaults(text: str | None) -> Mapping[str, Any]:
    """Return overridden sampling defaults, checked as a request's would be."""
    from lean_laguna.core.types import SamplingParams

    given = dict(_json_object(text, "--override-generation-config"))
    if "max_new_tokens" in given:
        given["max_tokens"] = given.pop("max_new_tokens")
    flag = "--override-generation-config"
    try:
        SamplingParams.from_dict(given, flag)
    except RequestError as error:  # that of a value names its field alone
        told = str(error)
        raise ConfigError(told if told.startswith(flag) else f"{flag}: {told}") from None
    return given


def _address(host: str, port: int) -> str:
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{port}"


def _say(line: str) -> None:
    from lean_laguna.cli.terminal import Terminal

    Terminal().note(f"lean-laguna: {line}")
