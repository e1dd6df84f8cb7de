"""Weights of a target to a Hugging Face folder, as poolside's checkpoints spell them; in: ``checkpoint``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save
from torch import nn

from lean_laguna.core.errors import CheckpointError
from lean_laguna.core.files import atomic_write_bytes, atomic_write_json
from lean_laguna.core.model_config import LagunaConfig


def save_laguna(
    source: nn.Module | Mapping[str, torch.Tensor],
    config: LagunaConfig,
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 4 << 30,
) -> None:
    """Write ``config.json`` and safetensors under Hugging Face's names, experts one by one.

    Each file appears whole or not at all; the config comes last.

    Args:
        source: The target or its state dict.
        config: Its config.
        path: Folder, made where missing; other files in it stay.
        dtype: Number format on disk; None keeps each tensor's. Correction biases are always float32.
        max_shard_bytes: Bytes of tensors per file, above which a further file begins.

    Raises:
        CheckpointError: A tensor is not finite.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, torch.Tensor]] = [{}]
    filled = 0
    for name, tensor in _stored_tensors(source, config):
        kind = torch.float32 if name.endswith("e_score_correction_bias") else dtype or tensor.dtype
        written = tensor.detach().to("cpu", kind).contiguous()
        if not bool(torch.isfinite(written).all()):
            raise CheckpointError(
                f"{folder}: tensor '{name}' has values that are not finite; nothing was written"
            )
        if shards[-1] and filled + written.nbytes > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = written.clone() if written.data_ptr() == tensor.data_ptr() else written
        filled += written.nbytes
    first = next(iter(shards[0].values()))
    described = {**config.to_dict(), "dtype": str(first.dtype).removeprefix("torch.")}
    _write_shards(folder, shards)
    atomic_write_json(folder / "config.json", described)


def _write_shards(folder: Path, shards: list[dict[str, torch.Tensor]]) -> None:
    count, index = len(shards), folder / "model.safetensors.index.json"
    files = (
        ["model.safetensors"]
        if count == 1
        else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    )
    for file, tensors in zip(files, shards, strict=True):
        atomic_write_bytes(folder / file, save(tensors, metadata={"format": "pt"}))
    if count > 1:
        total = sum(tensor.nbytes for tensors in shards for tensor in tensors.values())
        weight_map = {name: file for file, tensors in zip(files, shards, strict=True) for name in tensors}
        written = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        atomic_write_json(index, written)
    else:
        index.unlink(missing_ok=True)
    for stale in folder.glob("model*.safetensors"):
        if stale.name not in files:
            stale.unlink()


def _stored_tensors(
    source: nn.Module | Mapping[str, torch.Tensor], config: LagunaConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors as poolside's checkpoints spell them."""
    state = source.state_dict() if isinstance(source, nn.Module) else source
    for key, tensor in state.items():
        name = key.removeprefix("_orig_mod.")
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        prefix, _, leaf = name.rpartition(".")
        if prefix.endswith(".mlp.experts"):
            for expert in range(tensor.shape[0]):
                if leaf == "down_proj":
                    yield f"{prefix}.{expert}.down_proj.weight", tensor[expert]
                else:
                    gate, up = tensor[expert].chunk(2)
                    yield f"{prefix}.{expert}.gate_proj.weight", gate
                    yield f"{prefix}.{expert}.up_proj.weight", up
            continue
        name = name.replace(".mlp.gate.e_score_correction_bias", ".mlp.experts.e_score_correction_bias")
        yield name.replace(".mlp.shared_experts.", ".mlp.shared_expert."), tensor
