"""Options that several commands share: which models, which engine, which sampling."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from lean_laguna.cli.parser import Parser, draft_length, json_object, one_of, token_bias, whole
from lean_laguna.core.errors import CheckpointError, ConfigError
from lean_laguna.models.catalog import BUILT_IN, DEFAULT_MODEL, default_drafter, resolve_model

if TYPE_CHECKING:
    from lean_laguna.core.types import SamplingParams
    from lean_laguna.engine.llm import LLM

AUTO, NONE = "auto", "none"
# Flags of SamplingParams whose name and meaning are the field's.
SAMPLING_NUMBERS: dict[str, Any] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "min_tokens": int,
    "max_tokens": int,
    "seed": int,
    "logprobs": int,
    "prompt_logprobs": int,
    "thinking_token_budget": int,
}


class _GivenModel(argparse.Action):
    """Keeps whether the model was named: a server is asked for its own unless it was."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        namespace.model, namespace.is_model_given = values, True


def add_model_options(parser: Parser) -> None:
    """Add the target, the drafter and where they run."""
    parser.set_defaults(is_model_given=False)
    parser.add_argument("--model", default=DEFAULT_MODEL, action=_GivenModel)
    parser.add_argument("--drafter", default=AUTO)
    parser.add_argument("--device", type=one_of("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", type=one_of("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--threads", type=whole(1, 1024))
    parser.add_argument("--max-model-len", type=whole(1))
    parser.add_argument("--attention-factor", type=float)
    parser.add_argument("--kv-cache-dtype", type=one_of("auto", "fp8"), default=AUTO)


def add_dummy_options(parser: Parser) -> None:
    """Add the kernels, and random weights in place of a checkpoint's."""
    parser.add_argument("--kernels", type=one_of("auto", "torch", "triton", "cuda"), default=AUTO)
    parser.add_argument("--load-format", type=one_of("auto", "dummy"), default=AUTO)
    parser.add_argument("--shape")
    parser.add_argument("--scheme")


def add_draft_length_option(parser: Parser) -> None:
    """Add the draft length, and vLLM's way of giving it together with the drafter."""
    parser.add_argument("--num-speculative-tokens", type=draft_length, default=AUTO)
    parser.add_argument("--speculative-config")


def add_sampling_options(parser: Parser) -> None:
    """Add every field of ``SamplingParams`` that a command line can carry."""
    for name, kind in SAMPLING_NUMBERS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind)
    parser.add_argument("--logit-bias", type=token_bias, nargs="+", action="extend")
    parser.add_argument("--stop", nargs="+", action="extend")
    parser.add_argument("--stop-token-ids", type=int, nargs="+", action="extend")
    parser.add_argument("--allowed-token-ids", type=int, nargs="+", action="extend")
    parser.add_argument("--bad-words", nargs="+", action="extend")
    parser.add_argument("--ignore-eos", action="store_true", default=None)
    parser.add_argument("--include-stop-str-in-output", action="store_true", default=None)
    parser.add_argument("--keep-special-tokens", action="store_true", default=None)
    parser.add_argument("--structured-outputs", type=json_object)


def given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling fields that the command line sets, by their name in ``SamplingParams``."""
    names = (
        *SAMPLING_NUMBERS,
        "stop",
        "stop_token_ids",
        "allowed_token_ids",
        "bad_words",
        "ignore_eos",
        "include_stop_str_in_output",
        "structured_outputs",
    )
    given = {name: value for name in names if (value := getattr(args, name, None)) is not None}
    for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
        if name in given:
            given[name] = tuple(given[name])
    if getattr(args, "logit_bias", None):
        given["logit_bias"] = dict(args.logit_bias)
    if getattr(args, "keep_special_tokens", None):
        given["skip_special_tokens"] = False
    return given


def sampling_params(given: dict[str, Any], defaults: dict[str, Any]) -> SamplingParams:
    """Return parameters from what was given, then the defaults.

    Raises:
        RequestError: A value is out of range.
    """
    from lean_laguna.core.types import SamplingParams

    return SamplingParams(**{**defaults, **given})


def apply_speculative_config(args: argparse.Namespace) -> None:
    """Take drafter and draft length from ``--speculative-config``, where it was given.

    Raises:
        ConfigError: It is malformed, or the same was given another way too.
    """
    given = getattr(args, "speculative_config", None)
    if given is None:
        return
    if args.drafter != AUTO or args.num_speculative_tokens != AUTO:
        raise ConfigError(
            "--speculative-config gives drafter and draft length; leave out --drafter and "
            "--num-speculative-tokens"
        )
    from lean_laguna.core.config import SpeculativeConfig

    config = SpeculativeConfig.parse(given)
    assert config is not None
    args.drafter, args.num_speculative_tokens = config.model, config.num_speculative_tokens
    if config.quantization is not None:
        args.drafter_options = {"quantization": config.quantization}
    if config.is_synthetic:
        args.synthetic = {
            "rejection_sample_method": config.rejection_sample_method,
            "synthetic_acceptance_rates": config.synthetic_acceptance_rates,
            "synthetic_acceptance_length": config.synthetic_acceptance_length,
        }


def drafter_name(args: argparse.Namespace, *, is_required: bool) -> str | None:
    """Return which drafter to use; ``auto`` is the one made for the target, where it is on this machine.

    Args:
        args: The parsed command line.
        is_required: The command makes no sense without a drafter.

    Raises:
        ConfigError: A drafter is required and none is known or wanted.
        CheckpointError: It is not on this machine.
    """
    args.synthetic, args.drafter_options = {}, {}
    apply_speculative_config(args)
    if is_dummy(args) and args.drafter == AUTO:
        return "dummy" if is_required else None
    if args.drafter == NONE:
        if is_required:
            raise ConfigError(
                "--drafter none: this command compares with a drafter; name one, or leave it to auto"
            )
        return None
    if args.drafter != AUTO:
        return str(args.drafter)
    name = default_drafter(args.model)
    if name is None:
        if is_required:
            raise ConfigError(f"no drafter is known for the model '{args.model}'; name one with --drafter")
        return None
    if not is_required and name not in BUILT_IN:
        try:
            resolve_model(name)
        except CheckpointError:
            return None
    return name


def is_dummy(args: argparse.Namespace) -> bool:
    """Say whether weights are to be random, so that no checkpoint is needed."""
    return getattr(args, "load_format", AUTO) == "dummy"


def require_models(*names: str | None) -> None:
    """Refuse names that mean nothing on this machine, before seconds are spent on importing the engine.

    Raises:
        CheckpointError: Names the model and what would get it here.
    """
    for name in names:
        if name is not None:
            resolve_model(name)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of ``LLM`` that the command line sets."""
    options = {"device": args.device, "dtype": args.dtype}
    names = (
        "max_model_len",
        "attention_factor",
        "kv_cache_dtype",
        "kernels",
        "load_format",
        "shape",
        "scheme",
    )
    for name in names:
        if getattr(args, name, None) is not None:
            options[name] = getattr(args, name)
    return options


def set_threads(args: argparse.Namespace, llm: LLM) -> None:
    """Set the number of CPU threads to what was asked for, else to what decodes fastest now."""
    if args.threads is None:
        from lean_laguna.engine.threads import tune_num_threads

        tune_num_threads(llm.engine)
    else:
        import torch

        torch.set_num_threads(args.threads)
