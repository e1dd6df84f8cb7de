"""Writes ``quantization_config`` so that vLLM, compressed-tensors and this package read the same from it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from lean_laguna.convert.modules import class_of
from lean_laguna.convert.quantize_plan import as_written
from lean_laguna.convert.source import Source
from lean_laguna.core.errors import ConfigError
from lean_laguna.quant.arguments import weight_scheme
from lean_laguna.quant.config import read_quantization
from lean_laguna.quant.scheme import WeightScheme

_LAYER = re.compile(r"^(.*?layers)\.(\d+)\.(.*)$")


def quantization_json(source: Source, added: Mapping[str, WeightScheme]) -> dict[str, Any]:
    """Return the ``quantization_config`` of a source with further linears quantised.

    Args:
        source: Possibly quantised in part; what it says of those linears stays.
        added: Schemes of the linears that are quantised on top.

    Raises:
        ConfigError: The source's own quantisation is not in compressed-tensors' form.
    """
    schemes = {**source.quantised, **added}
    known = _own_groups(source)
    distinct = list(dict.fromkeys(schemes.values()))
    # Loaders that go by names alone take every weight but a norm's for a linear's.
    others = [module for module in source.other_modules() if not module.endswith("norm")]
    plain = [module for module in source.shapes if module not in schemes] + others
    groups = {}
    for i, scheme in enumerate(distinct):
        if len(distinct) == 1:
            # vLLM's output head is no Linear to it.
            targets = ["Linear", *(m for m in schemes if class_of(m) == "head")]
        else:
            targets = targets_of([m for m, own in schemes.items() if own == scheme], source.shapes)
        groups[f"group_{i}"] = {"targets": targets, **known.get(scheme, _group(scheme))}
    formats = {group["format"] for group in groups.values()}
    given = source.config.get("quantization_config") or source.config.get("compression_config") or {}
    written = {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": targets_of(plain, [*source.shapes, *others]),
        "kv_cache_scheme": given.get("kv_cache_scheme"),
        "global_compression_ratio": None,
    }
    _check(written, source, schemes)
    return written


def targets_of(modules: Iterable[str], all_modules: Iterable[str]) -> list[str]:
    """Return targets that match the given modules and no others of the checkpoint.

    A kind of module that is wholly meant is one expression over all layers and experts, else one per layer,
    else modules by name.
    """
    wanted, every = set(modules), list(all_modules)
    levels = (_over_all, _over_experts)
    chosen: dict[tuple[str, str], None] = {}
    left = wanted
    for level in levels:
        kinds: dict[tuple[str, str], set[str]] = {}
        for module in every:
            kinds.setdefault(level(module), set()).add(module)
        for kind, members in kinds.items():
            if members <= wanted and members & left:
                chosen[kind] = None
                left = left - members
    parents: dict[str, list[str]] = {}
    for parent, leaf in chosen:
        parents.setdefault(parent, []).append(leaf)
    # vLLM's drafter has its fc one level down.
    alone = [r"re:(.*\.)?fc$" if leaf == "fc" else leaf for leaf in parents.pop("", [])]
    return sorted(alone) + [_expression(*kind) for kind in parents.items()] + sorted(left)


def _over_all(module: str) -> tuple[str, str]:
    """Return the expression of a module's parent for all layers and experts, and its last part."""
    parent, leaf = _over_experts(module)
    return re.sub(r"layers\\\.\d+", r"layers\\.\\d+", parent), leaf


def _over_experts(module: str) -> tuple[str, str]:
    """Return the expression of a module's parent for all experts of its layer, and its last part.

    Outside of layers there is no parent, and the whole name.
    """
    match = _LAYER.match(module)
    if match is None:
        return "", module
    parent, _, leaf = match[3].rpartition(".")
    rest = re.sub(r"experts\\\.\d+", r"experts\\.\\d+", re.escape(parent))
    # transformers' spelling and Poolside's.
    rest = re.sub(r"shared_experts?$", "shared_experts?", rest)
    return rf".*layers\.{match[2]}\.{rest}", leaf


def _expression(parent: str, leaves: list[str]) -> str:
    words = leaves[0] if len(leaves) == 1 else f"({'|'.join(leaves)})"
    return rf"re:{parent}\.{words}$"


def _group(scheme: WeightScheme) -> dict[str, Any]:
    return {
        "weights": scheme.weights_json(),
        "input_activations": scheme.activations_json(),
        "output_activations": None,
        "format": scheme.storage,
    }


def _own_groups(source: Source) -> dict[WeightScheme, dict[str, Any]]:
    """Return the source's groups as they stand, by scheme, without their targets."""
    if not source.quantised:
        return {}
    if any(scheme.spelling != "compressed-tensors" for scheme in source.quantised.values()):
        raise ConfigError(
            f"{source.path}: its quantised weights are not in compressed-tensors' form, so none can be "
            "added; expected an unquantised checkpoint, or one in that form"
        )
    given = source.config.get("quantization_config") or source.config.get("compression_config") or {}
    found: dict[WeightScheme, dict[str, Any]] = {}
    for group in given.get("config_groups", {}).values():
        if not isinstance(group, Mapping):
            continue
        model_format = given.get("format")
        storage = group.get("format") or (None if model_format == "mixed-precision" else model_format)
        scheme = weight_scheme(group.get("weights"), group.get("input_activations"), storage, "config_groups")
        found[scheme] = {**group, "format": scheme.storage}
        found[scheme].pop("targets", None)
    return found


def _check(written: Mapping[str, Any], source: Source, schemes: Mapping[str, WeightScheme]) -> None:
    """Hold what was written against what was meant."""
    config = read_quantization({"quantization_config": written}, "the written config")
    assert config is not None, "it quantises something"
    for module in source.shapes:
        read, meant = config.scheme_of(module), schemes.get(module)
        same = read == meant or (read and meant and as_written(read) == as_written(meant))
        assert same, f"{module}: written {read}, meant {meant}"
