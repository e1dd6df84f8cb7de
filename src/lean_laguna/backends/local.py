"""Our own engine as a backend, in this process."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from lean_laguna.backends.base import GenerationResult, Progress, PromptInput, per_prompt_params
from lean_laguna.core.config import EngineConfig
from lean_laguna.core.errors import ConfigError, RequestError
from lean_laguna.core.provenance import checkpoint_hash
from lean_laguna.core.types import RequestOutput, SamplingParams
from lean_laguna.engine.llm import LLM
from lean_laguna.models.catalog import resolve_model
from lean_laguna.spec.proposer import DFlashProposer

if TYPE_CHECKING:
    from torch import nn


class LocalBackend:
    """Runs prompts through an ``LLM``; several backends may share one and differ in their draft length.

    Attributes:
        llm: The engine underneath.
        num_speculative_tokens: Draft tokens per step of every request; None leaves it to the engine.
    """

    def __init__(self, llm: LLM, *, num_speculative_tokens: int | None = None):
        self.llm = llm
        self.num_speculative_tokens = num_speculative_tokens

    @classmethod
    def load(cls, model: str, drafter: str | None = None, **options: Any) -> LocalBackend:
        """Load a target and maybe a drafter.

        Args:
            model: Catalog name, folder or id of a downloaded repository.
            drafter: The same for the drafter; None for none.
            **options: Of ``LLM``, ``num_speculative_tokens`` of the speculative configuration, and its other
                fields as ``synthetic``.

        Raises:
            ConfigError: An option is wrong.
            CheckpointError: A checkpoint is missing, damaged, or the two do not belong together.
        """
        length, synthetic = options.pop("num_speculative_tokens", "auto"), options.pop("synthetic", {})
        if drafter is not None:
            options["speculative_config"] = {"model": drafter, "num_speculative_tokens": length, **synthetic}
        return cls(LLM(model, **options))

    def without_drafter(self) -> LocalBackend:
        """Return a backend on the same weights whose engine has no drafter, not one that is turned off."""
        engine = self.llm.engine
        config = dataclasses.replace(engine.config, speculative=None)
        bare = type(engine)(engine.target, engine.tokenizer, None, config)
        return LocalBackend(LLM.from_engine(bare, self.llm.folder))

    def with_draft_length(self, num_speculative_tokens: int) -> LocalBackend:
        """Return a backend on the same engine with a fixed draft length.

        Raises:
            ConfigError: The drafter cannot draft so far.
        """
        if num_speculative_tokens > self.max_draft_tokens:
            raise ConfigError(
                f"a draft length of {num_speculative_tokens} is beyond this drafter, which drafts at most "
                f"{self.max_draft_tokens} tokens a step"
            )
        return LocalBackend(self.llm, num_speculative_tokens=num_speculative_tokens)

    @property
    def max_draft_tokens(self) -> int:
        """Longest draft; 0 without a drafter."""
        proposer = self.llm.engine.proposer
        return 0 if proposer is None else proposer.max_draft_tokens

    def generate(
        self,
        prompts: Sequence[PromptInput],
        params: SamplingParams | Sequence[SamplingParams],
        on_progress: Progress | None = None,
    ) -> list[GenerationResult]:
        """Complete every prompt, as ``Backend.generate`` says.

        The arrival of each run of tokens is known where one prompt is run alone.
        """
        each = per_prompt_params(params, len(prompts))
        if any(one.n != 1 for one in each):
            raise RequestError("n must be 1 here: one completion per prompt is compared", param="n")
        arrivals: list[float] = []
        num_seen = 0

        def watch(num_finished: int, num_prompts: int, num_tokens: int) -> None:
            nonlocal num_seen
            if num_tokens > num_seen:
                arrivals.append(time.perf_counter())
                num_seen = num_tokens
            if on_progress is not None:
                on_progress(num_finished, num_prompts)

        outputs = self.llm.generate(
            list(prompts), list(each), num_speculative_tokens=self.num_speculative_tokens, on_progress=watch
        )
        return [self._result(output, arrivals if len(outputs) == 1 else []) for output in outputs]

    def info(self) -> dict[str, Any]:
        """Return what a result file must say; see ``Backend.info``."""
        engine = self.llm.engine
        weight = next(_parameters(engine.target))
        facts: dict[str, Any] = {
            "engine": "lean-laguna",
            "engine_version": importlib.metadata.version("lean-laguna"),
            "device": weight.device.type,
            "dtype": str(weight.dtype).removeprefix("torch."),
            "kernels": engine.kernels,
            "num_threads": torch.get_num_threads(),
            "synthetic": engine.config.is_synthetic,
            "model": _facts(engine.config, engine.config.shape or engine.config.model, engine.target),
            "memory": {"target_weights": _weight_bytes(engine.target), "kv_cache": engine.kv_bytes},
        }
        if isinstance(engine.proposer, DFlashProposer) and engine.config.speculative is not None:
            speculative = engine.config.speculative
            facts["drafter"] = _facts(engine.config, speculative.model, engine.proposer.drafter)
            facts["memory"]["drafter_weights"] = _weight_bytes(engine.proposer.drafter)
            given = self.num_speculative_tokens
            facts["num_speculative_tokens"] = speculative.num_speculative_tokens if given is None else given
            facts["max_draft_tokens"] = self.max_draft_tokens
            if facts["num_speculative_tokens"] == "auto":
                facts["draft_length_reason"] = self.llm.stats().draft_length_reason
        if weight.device.type == "cuda":
            facts["gpu"] = torch.cuda.get_device_name(weight.device)
            facts["gpu_peak_bytes"] = torch.cuda.max_memory_allocated(weight.device)
        return facts

    def close(self) -> None:
        """Let go of the engine; its memory is freed with the last backend that shares it."""
        del self.llm

    def _result(self, output: RequestOutput, arrivals: Sequence[float]) -> GenerationResult:
        completion = output.outputs[0]
        is_drafting = self.max_draft_tokens > 0 and self.num_speculative_tokens != 0
        return GenerationResult(
            text=completion.text,
            token_ids=completion.token_ids,
            num_prompt_tokens=len(output.prompt_token_ids),
            finish_reason=completion.finish_reason,
            times=output.times,
            arrivals_s=tuple(arrivals),
            logprobs=completion.logprobs,
            speculation=completion.speculation if is_drafting else None,
            num_cached_tokens=output.num_cached_tokens,
        )


def _facts(config: EngineConfig, name: str, module: Any) -> dict[str, Any]:
    if config.load_format == "dummy":
        return {
            "name": f"{name}, random weights",
            "num_parameters": sum(p.numel() for p in _parameters(module)),
        }
    return {
        "name": name,
        "sha256": checkpoint_hash(resolve_model(name)),
        "num_parameters": sum(p.numel() for p in _parameters(module)),
    }


def _parameters(module: Any) -> Any:
    # The engine sees its models through protocols; what is loaded here is always a module.
    network: nn.Module = module
    return network.parameters()


def _weight_bytes(module: Any) -> int:
    return sum(p.numel() * p.element_size() for p in _parameters(module))
