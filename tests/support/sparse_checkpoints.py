"""Checkpoints of any size as headers over holes: what reads no weights cannot tell them from real ones."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lean_laguna.core.model_config import LagunaConfig
from lean_laguna.core.safetensors_header import DTYPE_BITS
from lean_laguna.plan.modules import target_modules
from lean_laguna.quant.config import QuantizationConfig, read_quantization

Spec = tuple[str, str, tuple[int, ...]]
NVFP4_EXPERTS: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["re:.*mlp[.](experts[.][0-9]+|shared_expert)[.].*_proj"],
            "weights": {
                "num_bits": 4,
                "type": "float",
                "symmetric": True,
                "strategy": "tensor_group",
                "group_size": 16,
                "dynamic": False,
            },
        }
    },
    "ignore": ["lm_head"],
    "kv_cache_scheme": {
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor",
        "symmetric": True,
        "dynamic": False,
    },
}


def write_sparse_target(
    folder: Path, config: LagunaConfig, *, quantization: Mapping[str, Any] | None = None, num_shards: int = 1
) -> Path:
    """Write a target's config, index and shards; the shards' weights are holes that read as zeros."""
    given = config.to_dict() | {"dtype": "bfloat16"}
    if quantization is not None:
        given["quantization_config"] = dict(quantization)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(given))
    specs = list(_specs(config, read_quantization(given, "config.json")))
    weight_map = {}
    for i in range(num_shards):
        name = f"model-{i + 1:05}-of-{num_shards:05}.safetensors"
        shard = specs[i::num_shards]
        write_sparse_file(folder / name, shard)
        weight_map |= {tensor: name for tensor, _, _ in shard}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return folder


def write_sparse_file(file: Path, specs: Iterable[Spec]) -> None:
    """Write one safetensors file of (name, dtype, shape) over a hole."""
    header: dict[str, Any] = {}
    end = 0
    for name, dtype, shape in specs:
        size = DTYPE_BITS[dtype] // 8
        for length in shape:
            size *= length
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    raw = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        stream.truncate(8 + len(raw) + end)


def _specs(config: LagunaConfig, quantization: QuantizationConfig | None) -> Iterable[Spec]:
    for module in target_modules(config):
        scheme = quantization.scheme_of(module.name) if quantization and module.is_linear else None
        if scheme is None:
            name = module.name if module.name.endswith("_bias") else f"{module.name}.weight"
            yield name, "BF16", module.shape
            continue
        for leaf, spec in scheme.tensors(module.shape[0], module.shape[1]).items():
            yield f"{module.name}.{leaf}", spec.dtype, spec.shape
