"""How vLLM finds a module's scheme in a quantization_config, for the modules of its Laguna.

Source: vLLM 0.25.1, layers/quantization/compressed_tensors/{utils,compressed_tensors}.py, models/laguna.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
CLASSES = {
    "qkv_proj": "QKVParallelLinear",
    "o_proj": "RowParallelLinear",
    "g_proj": "ColumnParallelLinear",
    "gate_proj": "ColumnParallelLinear",
    "up_proj": "ColumnParallelLinear",
    "down_proj": "RowParallelLinear",
    "lm_head": "ParallelLMHead",
    "embed_tokens": "VocabParallelEmbedding",
}


def its_module(module: str) -> tuple[str, str]:
    """Return the name and class under which vLLM asks for the scheme of a checkpoint's linear."""
    parent, _, leaf = module.rpartition(".")
    if ".experts." in module:
        return f"{parent.rpartition('.')[0]}.0.{leaf}", "RoutedExperts"
    if leaf in FUSED["qkv_proj"]:
        leaf = "qkv_proj"
    return f"{parent}.{leaf}".lstrip("."), CLASSES[leaf]


def group_of(config: Mapping[str, Any], name: str, kind: str) -> str | None:
    """Return the group that vLLM takes for a module; None where it leaves it unquantised.

    Raises:
        ValueError: Linears that it joins are not all ignored, or not all quantised.
    """
    parts = [name]
    leaf = name.rpartition(".")[2]
    if leaf in FUSED:
        parts = [name.replace(leaf, part) for part in FUSED[leaf]]
    ignored = {any(_match(part, target) for target in config["ignore"]) for part in parts}
    if len(ignored) > 1:
        raise ValueError(f"{name}: ignored in part")
    if ignored.pop():
        return None
    targets = {t: key for key, group in config["config_groups"].items() for t in group["targets"]}
    if "Linear" in targets:
        targets.setdefault("RoutedExperts", targets["Linear"])
    found = _first(name, targets)
    if found is None:
        words = [t for t in targets if not t.startswith("re:") and t.lower() in kind.lower()]
        found = words[0] if words else None
    if found is None and leaf in FUSED:
        matches = [_first(part, targets) for part in parts]
        found = matches[0] if all(matches) else None
    return None if found is None else targets[found]


def _first(name: str, targets: Iterable[str]) -> str | None:
    return next((target for target in targets if _match(name, target)), None)


def _match(name: str, target: str) -> bool:
    return bool(re.match(target[3:], name)) if target.startswith("re:") else target == name
