"""Options of a request as ``SamplingParams``: its own, else the server's, else the checkpoint's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lean_laguna.core.types import MAX_SEED, SamplingParams
from lean_laguna.server.errors import bad_request
from lean_laguna.server.schemas import SamplingFields, Speculative

_LEAST_SEED = -(2**63)


def sampling_params(fields: SamplingFields, defaults: Mapping[str, Any], **fixed: Any) -> SamplingParams:
    """Return the parameters of a request.

    Args:
        fields: What the request says.
        defaults: Values where it is silent.
        **fixed: Fields that the endpoint has worked out.

    Raises:
        RequestError: A value is out of range.
        ApiError: 400, the same.
    """
    given: dict[str, Any] = {}
    for name in SamplingFields.__struct_fields__:
        value = getattr(fields, name)
        if value is not None:
            given[name] = value
    if "logit_bias" in given:
        given["logit_bias"] = {_token_id(key): bias for key, bias in given["logit_bias"].items()}
    if "seed" in given:
        given["seed"] = _seed(given["seed"])
    return SamplingParams(**{**defaults, **given, **fixed})


def draft_length(speculative: bool | Speculative | None) -> int | None:
    """Return the draft tokens per step that a request asks for; None leaves it to the engine."""
    if isinstance(speculative, Speculative):
        return speculative.num_speculative_tokens
    return 0 if speculative is False else None


def _token_id(key: str) -> int:
    if not key.isascii() or not key.isdigit() or len(key) > 18:
        raise bad_request(
            f"logit_bias must map token ids to biases, found the key {key!r:.100}", "logit_bias"
        )
    return int(key)


def _seed(seed: int) -> int | None:
    """Return a seed as the key of a random stream; -1 draws one, as in vLLM."""
    if seed == -1:
        return None
    if not _LEAST_SEED <= seed <= MAX_SEED:
        raise bad_request(f"seed must be in -2**63 .. 2**64 - 1, found {seed}", "seed")
    return seed % (MAX_SEED + 1)
