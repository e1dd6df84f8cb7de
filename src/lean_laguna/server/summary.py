"""One line at start: what the server uses, and why."""

from __future__ import annotations

from lean_laguna.core.config import SpeculativeConfig
from lean_laguna.core.errors import CheckpointError
from lean_laguna.engine.llm import LLM
from lean_laguna.server.settings import ServerConfig


def summary(llm: LLM, config: ServerConfig) -> str:
    """Return what a user would want to know of a server that is ready, in one line."""
    engine = llm.engine
    weight = next(engine.target.parameters())
    parts = [
        _device(llm, weight.device.type),
        str(weight.dtype).removeprefix("torch."),
        f"{engine.kernels} kernels",
        _drafter(llm),
        _parsers(config),
        _thinking(llm, config),
        _sampling(llm, config),
        f"context {engine.max_model_len} tokens",
        f"{llm.config.max_num_seqs} sequences at once",
        f"{engine.kv_bytes / 2**20:.0f} MiB of keys and values"
        + (" in FP8" if llm.config.kv_cache_dtype == "fp8" else ""),
    ]
    return "; ".join(parts)


def _device(llm: LLM, kind: str) -> str:
    found = "no GPU found" if kind == "cpu" else "a GPU was found"
    return f"{kind} ({found if llm.config.device == 'auto' else 'asked for'})"


def _parsers(config: ServerConfig) -> str:
    if config.reasoning_parser == "none":
        return "parsers off (asked for)"
    source = "made for this architecture" if config.reasoning_parser == "auto" else "asked for"
    return f"parsers poolside_v1 ({source})"


def _drafter(llm: LLM) -> str:
    speculative: SpeculativeConfig | None = llm.config.speculative
    proposer = llm.engine.proposer
    if speculative is None or proposer is None:
        return "no drafter"
    length = speculative.num_speculative_tokens
    how = "chosen from measured times" if length == "auto" else "asked for"
    return (
        f"drafter {speculative.model}, {length} of at most {proposer.max_draft_tokens} tokens a step ({how})"
    )


def _thinking(llm: LLM, config: ServerConfig) -> str:
    """Say whether replies start in thinking, read off a rendered prompt."""
    try:
        template = llm.chat_template
    except CheckpointError:
        return "no chat template"
    rendered = template.render([{"role": "user", "content": "x"}], **config.default_chat_template_kwargs)
    state = "on" if template.starts_in_thinking(rendered) else "off"
    if "enable_thinking" in config.default_chat_template_kwargs:
        source = "asked for"
    else:
        source = "the checkpoint" if "enable_thinking" in template.default_kwargs else "the chat template"
    return f"thinking {state} by default ({source})"


def _sampling(llm: LLM, config: ServerConfig) -> str:
    recommended = llm.generation_config.sampling_defaults()
    values = {**recommended, **config.override_generation_config}
    source = "generation_config.json" if not config.override_generation_config else "as overridden"
    said = ", ".join(f"{name} {value}" for name, value in values.items())
    return f"sampling {said} ({source})" if said else "sampling at temperature 1"
