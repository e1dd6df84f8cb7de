"""Quantised checkpoints of the tiny target, made by the converter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from lean_laguna.convert.quantize import QuantizeResult, quantize
from lean_laguna.convert.quantize_plan import Rule, group_rules, make_plan, parse_scheme
from lean_laguna.convert.source import open_source
from lean_laguna.core.model_config import LagunaConfig
from lean_laguna.models.checkpoint import save_laguna
from support.targets import laguna_json, random_target


def write_target(folder: Path, dtype: torch.dtype = torch.bfloat16, seed: int = 0, **changes: Any) -> Path:
    """Write a tiny random target whose shapes fit every scheme with groups of 16."""
    config = LagunaConfig.from_dict(laguna_json(**changes))
    save_laguna(random_target(config, seed), config, folder, dtype=dtype)
    return folder


def convert(source: Path, destination: Path, modules: str, scheme: str, **options: Any) -> QuantizeResult:
    """Quantise classes of modules of a checkpoint."""
    opened = open_source(source)
    plan = make_plan(opened, group_rules(modules, parse_scheme(scheme)))
    return quantize(opened, destination, plan, **options)


def convert_mixed(source: Path, destination: Path) -> QuantizeResult:
    """Quantise a checkpoint with a format for every kind of module, and others in one layer."""
    opened = open_source(source)
    rules = [
        Rule(r"re:.*layers\.2\.mlp\.experts\..*", parse_scheme("int8:16")),
        Rule("model.layers.1.self_attn.o_proj", None),
        *group_rules("experts", parse_scheme("nvfp4")),
        *group_rules("attention", parse_scheme("fp8-channel")),
        *group_rules("dense", parse_scheme("int4:16")),
    ]
    return quantize(opened, destination, make_plan(opened, rules))


def change_tensors(folder: Path, **changes: Any) -> None:
    """Replace, or with None remove, tensors of a one-file checkpoint; dots in names are written as ``__``."""
    file = folder / "model.safetensors"
    tensors = load_file(str(file))
    for name, value in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if value is not None:
            tensors[name.replace("__", ".")] = value
    save_file(tensors, str(file), metadata={"format": "pt"})
