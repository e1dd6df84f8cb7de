"""What vLLM cannot run of a quantised checkpoint that is otherwise sound: it joins some linears into one.

Source: vLLM 0.25.1, model_executor: models/laguna.py, models/laguna_dflash.py,
layers/quantization/compressed_tensors, kernels/linear/mixed_precision.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from lean_laguna.convert.modules import class_of, fused_set
from lean_laguna.convert.source import Source
from lean_laguna.quant.scheme import WeightScheme

_BLOCKS, _FP8 = "experts in blocks of 128x128", "FP8 linears"
_SIZES = {_BLOCKS: 128, _FP8: 16}
_GROUPS, _HIDDEN = {4: (32, 64, 128, 256), 8: (32, 64, 128)}, 128
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
            "vLLM 0.25.1 loads no quantised drafter: load_weights of its laguna_dflash.py calls a method, "
            "get_cache_scale, that it no longer has; this engine does"
        )
    if not source.config.get("architectures"):
        notes.append("vLLM finds a model's class by 'architectures', which config.json lacks")
    for title, size in _SIZES.items():
        members = (module for module, scheme in merged.items() if _title(module, scheme) == title)
        odd = [module for module in members if any(n % size for n in source.shapes[module])]
        if odd:
            notes.append(
                f"vLLM takes {title} only where both sizes are multiples of {size}: {odd[0]} is "
                f"{list(source.shapes[odd[0]])}"
            )
    return notes + _integer_limits(source, merged)


def _integer_limits(source: Source, merged: Mapping[str, WeightScheme]) -> list[str]:
    notes = []
    integers = {module: scheme for module, scheme in merged.items() if scheme.storage == "pack-quantized"}
    experts = {module: scheme for module, scheme in integers.items() if class_of(module) == "experts"}
    for module, scheme in integers.items():
        sizes = _GROUPS[scheme.num_bits]
        if module not in experts and scheme.group_size is not None and scheme.group_size not in sizes:
            notes.append(
                f"vLLM takes linears of {scheme.num_bits} bits with a scale per row or in groups of "
                f"{', '.join(map(str, sizes))}: {module} has groups of {scheme.group_size}"
            )
            break
    for module, scheme in experts.items():
        hidden = source.shapes[module][0 if module.endswith("down_proj") else 1]
        if scheme.group_size is None and hidden % _HIDDEN:
            notes.append(
                "vLLM takes integer experts with a scale per row only where the hidden size is a multiple of "
                f"{_HIDDEN}: {module} is {list(source.shapes[module])}; groups are fine"
            )
            break
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
