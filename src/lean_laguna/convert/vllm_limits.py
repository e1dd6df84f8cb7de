"""What vLLM cannot run of a quantised checkpoint that is otherwise sound: it joins some linears into one.

Source: vLLM 0.25.1, model_executor/models/laguna.py and layers/quantization/compressed_tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from lean_laguna.convert.modules import class_of, fused_set
from lean_laguna.convert.source import Source
from lean_laguna.quant.scheme import WeightScheme

_BLOCKS, _FP8 = "experts in blocks of 128x128", "FP8 linears"
_SIZES = {_BLOCKS: 128, _FP8: 16}
_EXPERTS = re.compile(r"^(.*mlp\.experts)\.\d+\.")


def vllm_limits(source: Source, schemes: Mapping[str, WeightScheme]) -> list[str]:
    """Say what of a conversion vLLM would refuse, in sentences; empty where it would load it.

    Args:
        source: What is converted; its own quantised linears count too.
        schemes: Of the linears that will be quantised.
    """
    merged = {**source.quantised, **schemes}
    notes = []
    for title, joined in (("q, k and v of a layer", _qkv), ("all experts of a layer", _experts)):
        found: dict[str, set[WeightScheme | None]] = {}
        for module in source.shapes:
            name = joined(module)
            if name is not None:
                found.setdefault(name, set()).add(merged.get(module))
        mixed = [name for name, kinds in found.items() if len(kinds) > 1]
        if mixed:
            notes.append(f"vLLM runs {title} as one and refuses several schemes among them, as in {mixed[0]}")
    if source.is_drafter:
        notes.append(
            "vLLM 0.25.1 loads no drafter whose weights are in compressed-tensors' form; this engine does"
        )
    for title, size in _SIZES.items():
        members = (module for module, scheme in merged.items() if _title(module, scheme) == title)
        odd = [module for module in members if any(n % size for n in source.shapes[module])]
        if odd:
            notes.append(
                f"vLLM takes {title} only where both sizes are multiples of {size}: {odd[0]} is "
                f"{list(source.shapes[odd[0]])}"
            )
    return notes


def _title(module: str, scheme: WeightScheme) -> str | None:
    if class_of(module) == "experts":
        return _BLOCKS if scheme.block else None
    return _FP8 if scheme.number == "fp8" and not scheme.block else None


def _qkv(module: str) -> str | None:
    name = fused_set(module)
    return name if name.endswith("self_attn.qkv_proj") else None


def _experts(module: str) -> str | None:
    match = _EXPERTS.match(module)
    return match[1] if match else None
