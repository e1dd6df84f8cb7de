"""Drafters in and out of checkpoint folders: DFlash and DSpark, four formats in and out.

The config side of the formats is ``core.drafter_formats`` and ``core.drafter_writing``; here are their
tensors.
Source: vLLM 0.33 laguna_dflash.py load_weights (names are a plain lookup there, so they must match exactly),
z-lab dflash 0.1.0 model.py, speculators 0.9.0 model.py and models/dflash/core.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from lean_laguna.core.drafter_config import DFlashConfig
from lean_laguna.core.drafter_writing import write_config
from lean_laguna.core.errors import CheckpointError, ConfigError
from lean_laguna.core.files import atomic_write_bytes
from lean_laguna.core.model_config import LagunaConfig, config_path, read_config_json
from lean_laguna.models.dflash import DFlashDrafter
from lean_laguna.models.dspark import DSparkDrafter
from lean_laguna.models.quantised_reader import open_checkpoint
from lean_laguna.models.safetensors_reader import CheckpointReader
from lean_laguna.models.unset import on_meta
from lean_laguna.quant.config import read_quantization

# The target's own weights, which some writers leave in the drafter's file; the originals are used instead.
_BORROWED = ("embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight")
_PREFIXES = ("language_model.", "model.")
_FLOATS = ("F64", "F32", "F16", "BF16")
_NAMED_AT_MOST = 8


@dataclass(frozen=True)
class _Source:
    """The checkpoint tensors that one parameter is made of, joined along its first dimension.

    Attributes:
        shapes: Names in order, each with its shape; a vector fills one row of the parameter.
        fused: The name of one tensor that may stand for all of them, or None.
    """

    shapes: Mapping[str, tuple[int, ...]]
    fused: str | None = None

    def places(self, parameter: Tensor, fused: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield names and the part of the parameter that each fills, as a view."""
        if fused and self.fused is not None:
            yield self.fused, parameter
            return
        start = 0
        for name, shape in self.shapes.items():
            rows = 1 if len(shape) < parameter.ndim else shape[0]
            yield name, parameter[start : start + rows].view(shape)
            start += rows


def load_drafter(
    path: str | Path,
    target_config: LagunaConfig,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> DFlashDrafter:
    """Load a drafter folder of any of the formats, quantised or not, if it was made for this target.

    Args:
        path: Folder with config.json and safetensors.
        target_config: The target it will draft for.
        dtype: Of the weights in memory.
        device: Where they go; tensors are read one by one.

    Returns:
        The drafter, in evaluation mode, without gradients; a ``DSparkDrafter`` where it has those heads.

    Raises:
        CheckpointError: A target or another kind of drafter; missing, extra, misshapen or non-finite tensors;
            a vocabulary map that is absent or contradicts itself; a damaged file.
        ConfigError: A config value is wrong, or does not fit the target; names found and expected.
    """
    config = DFlashConfig.from_file(path)
    config.check_target(target_config, str(path))
    return read_drafter(path, dtype=dtype, device=device)


def read_drafter(
    path: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> DFlashDrafter:
    """Load a drafter folder as ``load_drafter`` does, with no target to hold it against.

    Raises:
        CheckpointError: As for ``load_drafter``.
        ConfigError: A config value is wrong.
    """
    loader = _matched(Path(path))
    loader.drafter.to(dtype).to_empty(device=device)
    loader.fill()
    return loader.drafter


def check_drafter(path: str | Path) -> None:
    """Hold a drafter's config and the headers of its files against each other; no weight is read.

    Raises:
        CheckpointError: As for ``load_drafter``, as far as headers tell.
        ConfigError: A config value is wrong.
    """
    _matched(Path(path))


def is_quantised(path: str | Path) -> bool:
    """Say whether a model folder's config names a quantisation."""
    return read_quantization(read_config_json(path), str(config_path(path))) is not None


def recorded_target(path: str | Path) -> str | None:
    """Return the hash of the target that a drafter was trained for, where its config records one."""
    provenance = read_config_json(path).get("provenance")
    found = provenance.get("target_sha256") if isinstance(provenance, dict) else None
    return found if isinstance(found, str) else None


def _matched(folder: Path) -> _Loader:
    """Return a drafter on the ``meta`` device and the tensors that belong into it."""
    config = DFlashConfig.from_file(folder)
    drafter = on_meta(lambda: make_drafter(config))
    reader = open_checkpoint(folder, read_config_json(folder), str(config_path(folder)))
    loader = _Loader(reader, drafter)
    loader.check()
    return loader


def make_drafter(config: DFlashConfig) -> DFlashDrafter:
    """Build the network that a config describes, with unset weights."""
    return DFlashDrafter(config) if config.dspark is None else DSparkDrafter(config)


def save_drafter(
    drafter: DFlashDrafter,
    path: str | Path,
    *,
    format: str = "laguna",
    dtype: torch.dtype | None = None,
    provenance: Mapping[str, Any] | None = None,
    target_name: str | None = None,
) -> None:
    """Write a drafter folder: config.json and model.safetensors, each whole or not at all.

    The target's embedding and lm_head are never written: they are the target's, and shared.

    Args:
        drafter: Unchanged; its weights may be on any device.
        path: Folder, made if absent.
        format: ``laguna``, ``z-lab``, ``speculators`` or ``deepspec``.
        dtype: Of the stored weights; None keeps the drafter's.
        provenance: Written into config.json under ``provenance``: target and data hash, commit and such.
        target_name: Name or path of the target, for the format that records it.

    Raises:
        ConfigError: Another format, a drafter that it cannot express, or a folder that cannot be written.
        CheckpointError: A weight is not finite.
    """
    kind = dtype or drafter.norm.dtype
    config = write_config(drafter.config, format, target_name)
    config["dtype"] = str(kind).removeprefix("torch.")
    if provenance:
        config["provenance"] = dict(provenance)
    tensors: dict[str, Tensor] = {}
    for name, source in _sources(drafter.config).items():
        value = drafter.get_parameter(name).detach().to(device="cpu", dtype=kind)
        if not torch.isfinite(value).all():
            raise CheckpointError(
                f"{path}: weight {name} has values that are not finite; nothing was written"
            )
        for part, view in source.places(value.contiguous(), fused=format == "laguna"):
            tensors[part] = view.clone()
    if drafter.d2t is not None:
        tensors |= _vocabulary_tensors(drafter.d2t.cpu(), drafter.config.vocab_size)
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write the folder {folder}: {error.strerror or error}") from None
    atomic_write_bytes(folder / "model.safetensors", save(tensors, metadata={"format": "pt"}))
    atomic_write_bytes(folder / "config.json", (json.dumps(config, indent=2) + "\n").encode())


def _vocabulary_tensors(d2t: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """Return both directions of a reduced vocabulary's map."""
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[torch.arange(len(d2t)) + d2t] = True
    return {"d2t": d2t.clone(), "t2d": t2d}


class _Loader:
    """Matches the tensors of a drafter's files with its parameters."""

    def __init__(self, reader: CheckpointReader, drafter: DFlashDrafter):
        self.reader, self.drafter, self.config = reader, drafter, drafter.config
        self.sources = _sources(drafter.config)
        self.stored: dict[str, str] = {}
        for name in reader.names():
            plain = name
            for prefix in _PREFIXES:
                plain = plain.removeprefix(prefix)
            if plain in self.stored:
                raise CheckpointError(
                    f"{reader.file_of(name)}: tensor '{name}' is also stored as '{self.stored[plain]}'"
                )
            self.stored[plain] = name

    def check(self) -> None:
        """Refuse missing, extra and misshapen tensors, from the headers alone."""
        wanted, missing = self._wanted()
        if missing:
            raise CheckpointError(
                f"{self.reader.path}: {len(missing)} of {len(wanted)} tensors are missing from a "
                f"{self.config.format} DFlash drafter of this config: {_listed(missing)}"
            )
        optional = {*_BORROWED, "t2d", "d2t", "lm_head.weight"}
        extra = [name for plain, name in self.stored.items() if plain not in wanted and plain not in optional]
        if extra:
            raise CheckpointError(
                f"{self.reader.file_of(extra[0])}: {len(extra)} tensors have no place in a "
                f"{self.config.format} DFlash drafter of this config: {_listed(extra)}"
            )
        for plain, shape in wanted.items():
            found = self.reader.shape(self.stored[plain])
            if found != shape:
                raise CheckpointError(
                    f"{self._where(plain)}: found shape {list(found)}, expected {list(shape)}"
                )
            kind = self.reader.dtype_name(self.stored[plain])
            if plain != "d2t" and kind not in _FLOATS:
                raise CheckpointError(
                    f"{self._where(plain)}: found type {kind}, expected one of {', '.join(_FLOATS)}, or a "
                    "quantization_config that says how it is quantised"
                )

    def fill(self) -> None:
        """Copy every tensor into its place."""
        for name, source in self.sources.items():
            for plain, place in source.places(self.drafter.get_parameter(name).data, self._is_fused(source)):
                self.reader.copy_to(self.stored[plain], place)
                if not torch.isfinite(place).all():
                    raise CheckpointError(f"{self._where(plain)}: not all values are finite in {place.dtype}")
        if self.drafter.d2t is not None:
            self.drafter.d2t.copy_(self._vocabulary_map())
        self.reader.close()

    def _wanted(self) -> tuple[dict[str, tuple[int, ...]], list[str]]:
        """Return all tensors of this drafter with their shapes, and the names of those that are missing."""
        wanted: dict[str, tuple[int, ...]] = {}
        for name, source in self.sources.items():
            fused = source.fused
            if fused is not None and not any(part in self.stored for part in source.shapes):
                wanted[fused] = tuple(self.drafter.get_parameter(name).shape)
            else:
                wanted |= source.shapes
        if self.config.has_own_lm_head:
            wanted["d2t"] = (self.config.draft_vocab_size,)
        return wanted, [name for name in wanted if name not in self.stored]

    def _is_fused(self, source: _Source) -> bool:
        return source.fused in self.stored

    def _vocabulary_map(self) -> Tensor:
        """Return d2t [Vd]: target word = draft word + d2t[draft word]; checked, against t2d too."""
        d2t = self.reader.get(self.stored["d2t"]).to(torch.int64)
        words = torch.arange(len(d2t)) + d2t
        vocab_size = self.config.vocab_size
        if not bool(((words >= 0) & (words < vocab_size)).all()) or len(set(words.tolist())) != len(words):
            raise CheckpointError(
                f"{self._where('d2t')}: must map each draft word to a target word of its own in "
                f"0..{vocab_size - 1}"
            )
        if "t2d" in self.stored:
            marked = torch.zeros(vocab_size, dtype=torch.bool)
            marked[words] = True
            if not torch.equal(self.reader.get(self.stored["t2d"]).bool(), marked):
                raise CheckpointError(f"{self._where('t2d')}: names other target words than 'd2t' maps to")
        return d2t

    def _where(self, plain: str) -> str:
        stored = self.stored[plain]
        return f"{self.reader.file_of(stored)}: tensor '{stored}'"


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
        norms = {f"aux_hidden_norms.{j}.weight": (width,) for j in range(num_taps)}
        sources["aux_hidden_norms"] = _Source(norms)
    if config.has_own_lm_head:
        sources["lm_head.weight"] = one("lm_head.weight", config.draft_vocab_size, width)
    if config.dspark is not None:
        heads = config.dspark
        features = width + (heads.markov_rank if heads.confidence_with_markov else 0)
        sources |= {
            "markov_w1": one("markov_head.markov_w1.weight", config.vocab_size, heads.markov_rank),
            "markov_w2": one("markov_head.markov_w2.weight", config.draft_vocab_size, heads.markov_rank),
        }
        if heads.has_confidence:
            sources["confidence_weight"] = one("confidence_head.proj.weight", 1, features)
            sources["confidence_bias"] = one("confidence_head.proj.bias", 1)
    for i in range(config.num_hidden_layers):
        layer, attn = f"layers.{i}.", f"layers.{i}.self_attn."
        parts = (("q", q), ("k", kv), ("v", kv))
        qkv = {f"{attn}{part}_proj.weight": (rows, width) for part, rows in parts}
        mlp = {f"{layer}mlp.{part}_proj.weight": (inner, width) for part in ("gate", "up")}
        sources |= {
            f"{layer}input_layernorm": one(f"{layer}input_layernorm.weight", width),
            f"{layer}post_attention_layernorm": one(f"{layer}post_attention_layernorm.weight", width),
            f"{attn}qkv_proj.weight": _Source(qkv, fused=f"{attn}qkv_proj.weight"),
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


def _listed(names: list[str]) -> str:
    rest = len(names) - _NAMED_AT_MOST
    return ", ".join(names[:_NAMED_AT_MOST]) + (f" and {rest} more" if rest > 0 else "")
