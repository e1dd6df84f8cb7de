"""DFlash drafters in and out of checkpoint folders: three formats in, Laguna native out.

The config side of the formats is ``core.drafter_formats``; here are their tensors.
Source: vLLM 0.33 laguna_dflash.py load_weights (names are a plain lookup there, so they must match exactly),
z-lab dflash 0.1.0 model.py, speculators 0.9.0 model.py and models/dflash/core.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from lean_laguna.core.drafter_config import DFlashConfig
from lean_laguna.core.errors import CheckpointError, ConfigError
from lean_laguna.core.files import atomic_write_bytes
from lean_laguna.core.model_config import LagunaConfig
from lean_laguna.models.checkpoint import CheckpointReader
from lean_laguna.models.dflash import DFlashDrafter

# The target's own weights, which some writers leave in the drafter's file; the originals are used instead.
_BORROWED = ("embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight")
_PREFIXES = ("model.", "language_model.model.", "language_model.")
_NAMED_AT_MOST = 8


@dataclass(frozen=True)
class _Source:
    """Where one parameter comes from: the named tensors, joined along rows (or stacked, for vectors).

    Attributes:
        shapes: Checkpoint names in order, each with its shape.
        fused: One tensor that may stand for all of them, or None.
    """

    shapes: Mapping[str, tuple[int, ...]]
    fused: str | None = None


def load_drafter(
    path: str | Path,
    target_config: LagunaConfig,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> DFlashDrafter:
    """Load a drafter folder of any of the three formats and check that it was made for this target.

    Args:
        path: Folder with config.json and safetensors.
        target_config: The target it will draft for.
        dtype: Of the weights in memory.
        device: Where they go; tensors are read one by one.

    Raises:
        CheckpointError: A target or another kind of drafter; missing, extra, misshapen or non-finite tensors;
            a vocabulary map that is absent or contradicts itself.
        ConfigError: A config value is wrong, or does not fit the target; names found and expected.
    """
    folder = Path(path)
    config = DFlashConfig.from_file(folder)
    config.check_target(target_config, str(folder))
    reader = CheckpointReader(folder)
    stored = _stored_names(reader.names())
    sources = _sources(config)
    _check_names(config, sources, stored, folder)
    with torch.device("meta"):
        drafter = DFlashDrafter(config)
    for name, parameter in list(drafter.named_parameters()):
        tensor = _assemble(sources[name], reader, stored, folder).to(device=device, dtype=dtype)
        assert tensor.shape == parameter.shape, name
        _assign(drafter, name, torch.nn.Parameter(tensor, requires_grad=False))
    if config.has_own_lm_head:
        drafter.d2t = _vocabulary_map(config, reader, stored, folder).to(device)
    return drafter.eval()


def save_drafter(
    drafter: DFlashDrafter,
    path: str | Path,
    *,
    format: str = "laguna",
    dtype: torch.dtype | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> None:
    """Write a Laguna native drafter folder: config.json and model.safetensors, each whole or not at all.

    Args:
        drafter: Unchanged; its weights may be on any device.
        path: Folder, made if absent.
        format: Only ``laguna``.
        dtype: Of the stored weights; None keeps the drafter's.
        provenance: Written into config.json under ``provenance``: target and data hash, commit and such.

    Raises:
        ConfigError: Another format, a drafter that it cannot express, or a folder that cannot be written.
    """
    if format != "laguna":
        raise ConfigError(f"drafters are written in the format 'laguna', found {format!r}")
    config = drafter.config.to_dict()
    tensors: dict[str, Tensor] = {}
    for name, source in _sources(drafter.config).items():
        value = drafter.get_parameter(name).detach().to(device="cpu", dtype=dtype or drafter.norm.dtype)
        if source.fused is not None:
            tensors[source.fused] = value.clone(memory_format=torch.contiguous_format)
            continue
        rows = [shape[0] for shape in source.shapes.values()]
        parts = torch.split(value.flatten() if _is_stacked(source) else value, rows)
        tensors |= {
            part: piece.clone(memory_format=torch.contiguous_format)
            for part, piece in zip(source.shapes, parts, strict=True)
        }
    config["dtype"] = str(dtype or drafter.norm.dtype).removeprefix("torch.")
    if provenance:
        config["provenance"] = dict(provenance)
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write the folder {folder}: {error.strerror or error}") from None
    atomic_write_bytes(folder / "model.safetensors", save(tensors, metadata={"format": "pt"}))
    atomic_write_bytes(folder / "config.json", (json.dumps(config, indent=2) + "\n").encode())


def _sources(config: DFlashConfig) -> dict[str, _Source]:
    """Return, per parameter of ``DFlashDrafter``, the checkpoint tensors it is made of."""
    width, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * head, config.num_key_value_heads * head
    num_taps = len(config.target_layer_ids)

    def one(name: str, *shape: int) -> _Source:
        return _Source({name: shape})

    sources = {
        "fc.weight": one("fc.weight", width, num_taps * width),
        "hidden_norm": one("hidden_norm.weight", width),
        "norm": one("norm.weight", width),
    }
    if config.has_aux_norms:
        sources["aux_hidden_norms"] = _Source(
            {f"aux_hidden_norms.{j}.weight": (width,) for j in range(num_taps)}
        )
    if config.has_own_lm_head:
        sources["lm_head.weight"] = one("lm_head.weight", config.draft_vocab_size, width)
    for i in range(config.num_hidden_layers):
        layer, attn = f"layers.{i}.", f"layers.{i}.self_attn."
        split = {
            f"{attn}{part}_proj.weight": (rows, width) for part, rows in (("q", q), ("k", kv), ("v", kv))
        }
        mlp = {f"{layer}mlp.{part}_proj.weight": (inner, width) for part in ("gate", "up")}
        sources |= {
            f"{layer}input_layernorm": one(f"{layer}input_layernorm.weight", width),
            f"{layer}post_attention_layernorm": one(f"{layer}post_attention_layernorm.weight", width),
            f"{attn}qkv_proj.weight": _Source(split, fused=f"{attn}qkv_proj.weight"),
            f"{attn}o_proj.weight": one(f"{attn}o_proj.weight", width, q),
            f"{attn}q_norm": one(f"{attn}q_norm.weight", head),
            f"{attn}k_norm": one(f"{attn}k_norm.weight", head),
            f"{layer}gate_up_proj.weight": _Source(mlp),
            f"{layer}down_proj.weight": one(f"{layer}mlp.down_proj.weight", width, inner),
        }
        if config.gating != "off":
            gates = config.num_attention_heads if config.gating == "per-head" else q
            sources[f"{attn}g_proj.weight"] = one(f"{attn}g_proj.weight", gates, width)
    return sources


def _is_stacked(source: _Source) -> bool:
    return len(source.shapes) > 1 and all(len(shape) == 1 for shape in source.shapes.values())


def _stored_names(names: Iterable[str]) -> dict[str, str]:
    """Map plain names to the names in the file, which may carry a prefix."""
    stored = {}
    for name in names:
        plain = name
        for prefix in _PREFIXES:
            plain = plain.removeprefix(prefix)
        stored[plain] = name
    return stored


def _check_names(
    config: DFlashConfig, sources: Mapping[str, _Source], stored: Mapping[str, str], folder: Path
) -> None:
    wanted: set[str] = set()
    missing: list[str] = []
    for source in sources.values():
        fused = source.fused
        names = [fused] if fused is not None and fused in stored else list(source.shapes)
        wanted.update(names)
        if fused is not None and not any(name in stored for name in names):
            missing.append(fused)
        else:
            missing += [name for name in names if name not in stored]
    optional = {*_BORROWED, "d2t", "t2d"} | (set() if config.has_own_lm_head else {"lm_head.weight"})
    if config.has_own_lm_head and "d2t" not in stored:
        missing.append("d2t")
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} of the {len(wanted)} tensors of a {config.format} DFlash drafter are "
            f"missing: {_listed(missing)}"
        )
    extra = sorted(stored[name] for name in stored if name not in wanted and name not in optional)
    if extra:
        raise CheckpointError(
            f"{folder}: {len(extra)} tensors have no place in a {config.format} DFlash drafter with this "
            f"config: {_listed(extra)}"
        )


def _listed(names: list[str]) -> str:
    rest = len(names) - _NAMED_AT_MOST
    return ", ".join(names[:_NAMED_AT_MOST]) + (f" and {rest} more" if rest > 0 else "")


def _assemble(source: _Source, reader: CheckpointReader, stored: Mapping[str, str], folder: Path) -> Tensor:
    """Read the tensors of one parameter and join them."""
    shapes = source.shapes
    if source.fused is not None and source.fused in stored:
        shapes = {source.fused: (sum(s[0] for s in shapes.values()), *next(iter(shapes.values()))[1:])}
    parts = [_read(reader, stored[name], shape, folder) for name, shape in shapes.items()]
    if _is_stacked(source):
        return torch.stack(parts)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _read(reader: CheckpointReader, name: str, shape: tuple[int, ...], folder: Path) -> Tensor:
    found = tuple(reader.shape(name))
    if found != shape:
        raise CheckpointError(f"{folder}: tensor {name} must have shape {list(shape)}, found {list(found)}")
    tensor = reader.get(name)
    if tensor.is_floating_point() and not torch.isfinite(tensor).all():
        raise CheckpointError(f"{folder}: tensor {name} holds values that are not finite")
    return tensor


def _vocabulary_map(
    config: DFlashConfig, reader: CheckpointReader, stored: Mapping[str, str], folder: Path
) -> Tensor:
    """Return d2t [Vd] int64: target word = draft word + d2t[draft word]."""
    d2t = _read(reader, stored["d2t"], (config.draft_vocab_size,), folder).to(torch.int64)
    words = torch.arange(config.draft_vocab_size) + d2t
    if (
        int(words.min()) < 0
        or int(words.max()) >= config.vocab_size
        or torch.unique(words).numel() != words.numel()
    ):
        raise CheckpointError(
            f"{folder}: tensor d2t must map each draft word to a target word of its own, 0 to "
            f"{config.vocab_size - 1}"
        )
    if "t2d" in stored:
        t2d = _read(reader, stored["t2d"], (config.vocab_size,), folder).bool()
        if not torch.equal(t2d.nonzero().flatten(), words.sort().values):
            raise CheckpointError(
                f"{folder}: tensors d2t and t2d name different target words; expected the same set"
            )
    return d2t


def _assign(drafter: DFlashDrafter, name: str, parameter: torch.nn.Parameter) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(drafter.get_submodule(owner), leaf, parameter)
