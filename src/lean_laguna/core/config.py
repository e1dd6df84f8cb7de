"""Configuration of the engine and of speculation: frozen, strict about unknown keys, resolved once.

Model architectures are described in ``model_config`` and ``drafter_config``.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lean_laguna.core.errors import ConfigError, reject_unknown
from lean_laguna.core.files import parse_json
from lean_laguna.core.json_fields import is_finite_number
from lean_laguna.core.rope_config import (
    LEAST_ATTENTION_FACTOR,
    MOST_ATTENTION_FACTOR,
    is_attention_factor,
)
from lean_laguna.core.types import MAX_SEED

SpeculativeMethod = Literal["dflash", "dspark"]
DraftLength = int | Literal["auto"]
RejectionSampleMethod = Literal["standard", "synthetic"]


@dataclass(frozen=True)
class SpeculativeConfig:
    """Which drafter proposes tokens and how many, with the keys of vLLM's ``--speculative-config``.

    Attributes:
        model: Checkpoint folder or catalog name of the drafter.
        method: How it drafts; None reads it from the drafter's own config.
        num_speculative_tokens: Draft tokens per step, 0 (off) to the drafter's limit, or "auto": chosen while
            running from measured step times and acceptance, off included.
        rejection_sample_method: ``standard``: the target decides; ``synthetic``: drafts stand by a draw at
            given rates, for timing only, and what comes out is not the model's output.
        synthetic_acceptance_rates: Entry i is the probability that the first i + 1 drafts all stand. A tuple
            of such tuples: each step draws one of them, and on the GPU's
            kernels a drafter with a confidence head knows which.
        synthetic_acceptance_length: In place of rates: mean tokens of a step, the target's own included.
        quantization: ``fp8``: the drafter's linears are rounded to FP8 when loaded, a scale a row, and read
            so by the GPU's kernels; other drafts now and then, never other output. None: as stored.
    """

    model: str
    method: SpeculativeMethod | None = None
    num_speculative_tokens: DraftLength = "auto"
    rejection_sample_method: RejectionSampleMethod = "standard"
    synthetic_acceptance_rates: tuple[float, ...] | tuple[tuple[float, ...], ...] | None = None
    synthetic_acceptance_length: float | None = None
    quantization: Literal["fp8"] | None = None

    def __post_init__(self) -> None:
        """Refuse wrong values.

        Raises:
            ConfigError: Names the key, the value and what is accepted.
        """
        if not isinstance(self.model, str) or not self.model:
            raise ConfigError(f"speculative config: 'model' must name a drafter, found {self.model!r}")
        if self.method not in (None, "dflash", "dspark"):
            raise ConfigError(
                f"speculative config: 'method' must be 'dflash' or 'dspark', found {self.method!r}"
            )
        if self.quantization not in (None, "fp8"):
            raise ConfigError(
                f"speculative config: 'quantization' must be 'fp8' or left out, found {self.quantization!r}"
            )
        k = self.num_speculative_tokens
        if k != "auto" and (isinstance(k, bool) or not isinstance(k, int) or k < 0):
            raise ConfigError(
                f"speculative config: 'num_speculative_tokens' must be a count from 0 or 'auto', found {k!r}"
            )
        if self.synthetic_acceptance_rates is not None:
            object.__setattr__(self, "synthetic_acceptance_rates", _rates(self.synthetic_acceptance_rates))
        self._check_synthetic()

    @property
    def is_synthetic(self) -> bool:
        """True where drafts stand by given rates, so that the output is not the model's."""
        return self.rejection_sample_method == "synthetic"

    def synthetic_rates(self, max_draft_tokens: int) -> tuple[tuple[float, ...], ...] | None:
        """Return the sets of rates to accept at, by position; None where the target decides."""
        if not self.is_synthetic:
            return None
        length, rates = self.synthetic_acceptance_length, self.synthetic_acceptance_rates
        if rates is not None:
            return _rate_sets(rates)
        assert length is not None
        return (tuple(min(1.0, max(0.0, length - 1 - i)) for i in range(max_draft_tokens)),)

    def _check_synthetic(self) -> None:
        where = "speculative config"
        if self.rejection_sample_method not in ("standard", "synthetic"):
            raise ConfigError(
                f"{where}: 'rejection_sample_method' must be 'standard' or 'synthetic', "
                f"found {self.rejection_sample_method!r}"
            )
        rates, length = self.synthetic_acceptance_rates, self.synthetic_acceptance_length
        num_given = (rates is not None) + (length is not None)
        if num_given != self.is_synthetic:
            raise ConfigError(
                f"{where}: one of 'synthetic_acceptance_rates' and 'synthetic_acceptance_length' goes "
                f'with "rejection_sample_method": "synthetic", and none without it; found {num_given}'
            )
        if length is not None and not (is_finite_number(length) and length >= 1):
            raise ConfigError(f"{where}: 'synthetic_acceptance_length' must be from 1, found {length!r}")
        k = self.num_speculative_tokens
        for own in _rate_sets(rates) if rates is not None else ():
            if k != "auto" and k > len(own):
                raise ConfigError(
                    f"{where}: 'synthetic_acceptance_rates' must have a rate for each of the {k} "
                    f"num_speculative_tokens, found {len(own)}"
                )

    @classmethod
    def parse(cls, given: SpeculativeConfig | Mapping[str, Any] | str | None) -> SpeculativeConfig | None:
        """Accept a mapping, a JSON object as text, a config or None.

        Raises:
            ConfigError: On malformed JSON, an unknown key or a wrong value.
        """
        if given is None or isinstance(given, SpeculativeConfig):
            return given
        if isinstance(given, str):
            try:
                given = parse_json(given)
            except ValueError as error:
                raise ConfigError(
                    f"speculative config: not valid JSON ({error}); found {given!r:.200}"
                ) from None
        if not isinstance(given, Mapping):
            raise ConfigError(
                'speculative config: must be a JSON object such as {"model": "nano-dflash", '
                f'"num_speculative_tokens": 7}}, found {given!r}'
            )
        reject_unknown(given, (f.name for f in dataclasses.fields(cls)), "speculative config")
        if "model" not in given:
            raise ConfigError("speculative config: key 'model' is missing; it names the drafter")
        return cls(**given)


def _rate_sets(rates: tuple[float, ...] | tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
    """Return rates as sets of them."""
    return tuple(own for own in rates if isinstance(own, tuple)) or (
        tuple(rate for rate in rates if not isinstance(rate, tuple)),
    )


def _rates(given: Any) -> tuple[float, ...] | tuple[tuple[float, ...], ...]:
    """Read rates: numbers in [0, 1] that do not increase, or a list of such lists."""
    if isinstance(given, list | tuple) and given and all(isinstance(own, list | tuple) for own in given):
        return tuple(_one_set(own) for own in given)
    return _one_set(given)


def _one_set(given: Any) -> tuple[float, ...]:
    values = tuple(given) if isinstance(given, list | tuple) else ()
    is_rate = bool(values) and all(is_finite_number(v) and 0 <= v <= 1 for v in values)
    if not is_rate or any(a < b for a, b in itertools.pairwise(values)):
        raise ConfigError(
            "speculative config: 'synthetic_acceptance_rates' must be numbers from 0 to 1 that do not "
            f"increase, found {given!r:.200}"
        )
    return values


@dataclass(frozen=True)
class EngineConfig:
    """Everything that fixes what an engine computes and how much it holds; printed with every result.

    Attributes:
        model: Checkpoint folder or catalog name of the target.
        speculative: The drafter, or None.
        device: ``auto`` (a GPU if there is one), ``cpu`` or ``cuda``.
        dtype: ``auto`` (float32 on a CPU, bfloat16 on a GPU), ``float32`` or ``bfloat16``.
        max_model_len: Longest prompt plus output in tokens; None takes the checkpoint's limit.
        max_num_seqs: Requests decoded at once, at least 1.
        prefill_chunk_size: Most prompt tokens computed per step. Chunks start at absolute multiples of it;
            with the Triton kernels, at those of 2048 where that divides it. None takes 256; with these
            kernels 8192 for a prompt alone, and 2048 beside other requests.
        kv_block_size: Tokens per KV page; divides ``prefill_chunk_size``.
        kv_cache_dtype: ``auto``: keys and values are kept in ``dtype``; ``fp8``: the target's as e4m3, with
            the checkpoint's ``k_scale`` and ``v_scale`` or 1. Half the memory or less; the output is no more
            that of an unquantised cache, but still the same with a drafter and without.
        kv_cache_memory_bytes: Memory for all KV pages; None sizes it for ``max_num_seqs`` full-length
            requests, at most a quarter of the memory that is free, three quarters on a GPU.
        enable_prefix_caching: Keep the KV pages, and the drafter's context, of prompts for later requests.
        attention_factor: Overrides the YaRN attention factor of the checkpoint's full-attention layers.
        seed: Seeds requests that bring no seed of their own; None draws one.
        kernels: ``torch``: plain PyTorch; ``triton``: the kernels of ``kernels.triton``, on a GPU or under
            Triton's interpreter; ``cuda``: those, and CUDA C++ for the layers' parts that fit; ``auto``:
            like ``cuda`` on a GPU, where the models allow it.
        load_format: ``auto`` reads weights; ``dummy`` draws them at random, for timing only: of ``shape``, or
            of the model folder's ``config.json``.
        shape: With ``dummy``: a published model's name, such as ``laguna-xs``; the drafter named ``dummy`` is
            of the same family.
        scheme: With ``dummy``: how weights are stored, such as ``nvfp4`` (``quant.builds``); None is BF16.
    """

    model: str = "nano"
    speculative: SpeculativeConfig | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 16
    prefill_chunk_size: int | None = None
    kv_block_size: int = 16
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    attention_factor: float | None = None
    seed: int | None = None
    kernels: Literal["auto", "torch", "triton", "cuda"] = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    shape: str | None = None
    scheme: str | None = None

    def __post_init__(self) -> None:
        """Refuse values out of range.

        Raises:
            ConfigError: Names the field, the value and what is accepted.
        """
        for name, accepted in (
            ("device", ("auto", "cpu", "cuda")),
            ("dtype", ("auto", "float32", "bfloat16")),
            ("kernels", ("auto", "torch", "triton", "cuda")),
            ("kv_cache_dtype", ("auto", "fp8")),
            ("load_format", ("auto", "dummy")),
        ):
            if getattr(self, name) not in accepted:
                raise ConfigError(
                    f"{name} must be one of {', '.join(accepted)}, found {getattr(self, name)!r}"
                )
        for name in (
            "max_model_len",
            "max_num_seqs",
            "prefill_chunk_size",
            "kv_block_size",
            "kv_cache_memory_bytes",
        ):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} must be a positive whole number, found {value!r}")
        if not isinstance(self.model, str | os.PathLike):
            raise ConfigError(f"model must be a folder or a name, found {self.model!r}")
        if not isinstance(self.enable_prefix_caching, bool):
            raise ConfigError(
                f"enable_prefix_caching must be true or false, found {self.enable_prefix_caching!r}"
            )
        factor, seed = self.attention_factor, self.seed
        if factor is not None and not is_attention_factor(factor):
            raise ConfigError(
                f"attention_factor must be a number from {LEAST_ATTENTION_FACTOR:g} to "
                f"{MOST_ATTENTION_FACTOR:g}, found {factor!r}"
            )
        if seed is not None and (type(seed) is not int or not 0 <= seed <= MAX_SEED):
            raise ConfigError(f"seed must be a whole number in 0 .. 2**64 - 1, found {seed!r}")
        if self.scheme is not None and self.load_format != "dummy":
            raise ConfigError(
                f"scheme {self.scheme!r} goes with load_format 'dummy' only; a checkpoint says so itself"
            )
        if self.shape is not None and self.load_format != "dummy":
            raise ConfigError(
                f"shape {self.shape!r} goes with load_format 'dummy' only; a checkpoint has its own"
            )
        # The default is 256 or a multiple of it.
        chunk = 256 if self.prefill_chunk_size is None else self.prefill_chunk_size
        if chunk % self.kv_block_size:
            raise ConfigError(
                f"prefill_chunk_size ({chunk}; of serve: --max-num-batched-tokens) must be a multiple of "
                f"kv_block_size ({self.kv_block_size}; of serve: --block-size)"
            )

    @property
    def is_synthetic(self) -> bool:
        """True where what comes out is no model's output: random weights, or drafts that stand by a draw."""
        return self.load_format == "dummy" or bool(self.speculative and self.speculative.is_synthetic)

    @classmethod
    def from_dict(cls, given: Mapping[str, Any], where: str = "engine config") -> EngineConfig:
        """Build from a mapping, strict about unknown keys.

        Raises:
            ConfigError: On an unknown key or a wrong value.
        """
        reject_unknown(given, (f.name for f in dataclasses.fields(cls)), where)
        return cls(**{**given, "speculative": SpeculativeConfig.parse(given.get("speculative"))})
