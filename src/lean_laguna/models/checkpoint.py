"""Weights of a target in and out: Hugging Face folders in any spelling of the family.

Source: tensor names of poolside/Laguna-XS.2, XS-2.1, S-2.1 and of transformers' ``save_pretrained``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from lean_laguna.core.errors import CheckpointError, ConfigError
from lean_laguna.core.model_config import LagunaConfig, config_path, read_config_json
from lean_laguna.models.laguna import LagunaForCausalLM
from lean_laguna.models.safetensors_reader import CheckpointReader

__all__ = ["CheckpointReader", "load_laguna", "load_target_config", "save_laguna"]

_FLOATS = ("F32", "BF16", "F16", "F64")
_EMBEDDING = "embed_tokens.weight"
_IGNORED = re.compile(r"\.rotary_emb\.inv_freq$")
_RESPELLED = (
    (".mlp.experts.e_score_correction_bias", ".mlp.gate.e_score_correction_bias"),
    (".mlp.shared_expert.", ".mlp.shared_experts."),
    (".mlp.experts.gate_up_proj.weight", ".mlp.experts.gate_up_proj"),
    (".mlp.experts.down_proj.weight", ".mlp.experts.down_proj"),
)
_EXPERT = re.compile(r"^(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")


def load_target_config(path: str | Path, *, attention_factor: float | None = None) -> LagunaConfig:
    """Read a target's config as it will be run.

    Args:
        path: Checkpoint folder.
        attention_factor: Replaces YaRN's factor on cos and sin of full-attention layers.

    Raises:
        CheckpointError: The config is missing, not JSON, or describes a quantised checkpoint.
        ConfigError: A field is wrong.
    """
    given, file = read_config_json(path), config_path(path)
    _refuse_quantised(given, file)
    return _resolve_attention_factor(LagunaConfig.from_dict(given, str(file)), attention_factor, file)


def load_laguna(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    attention_factor: float | None = None,
) -> LagunaForCausalLM:
    """Load a target, tensor by tensor from mapped files, so that no second copy is ever in memory.

    Args:
        path: Checkpoint folder with ``config.json`` and safetensors.
        dtype: Number format in memory; files may hold another.
        device: Where the weights go.
        attention_factor: Replaces YaRN's factor on cos and sin of full-attention layers.

    Returns:
        The target, in evaluation mode, without gradients.

    Raises:
        CheckpointError: A file or tensor is missing, extra, misshapen, damaged or not finite; names the file, the
            tensor, what was found and what was expected.
        ConfigError: A config field is wrong; names file, field, value found and values accepted.
    """
    given, file = read_config_json(path), config_path(path)
    _refuse_quantised(given, file)
    reader = CheckpointReader(path)
    stored = _canonical_names(reader)
    _infer_gating(given, reader, stored)
    config = _resolve_attention_factor(LagunaConfig.from_dict(given, str(file)), attention_factor, file)
    with torch.device("meta"):
        model = LagunaForCausalLM(config)
    model.requires_grad_(False).eval()
    loader = _Loader(reader, stored, model)
    loader.check_names()
    model.to(dtype).to_empty(device=device)
    with torch.no_grad():
        loader.fill()
    reader.close()
    return model


class _Loader:
    """Matches the tensors of files with the parameters of a model."""

    def __init__(self, reader: CheckpointReader, stored: Mapping[str, str], model: LagunaForCausalLM):
        self.reader, self.stored, self.model = reader, dict(stored), model
        self.is_tied = model.config.tie_word_embeddings
        self.width = model.config.moe_intermediate_size

    def pieces(self) -> Iterator[tuple[str, tuple[int, ...], nn.Parameter, Any]]:
        """Yield canonical tensor name, expected shape, parameter and the index of the tensor's place in it."""
        for name, parameter in self.model.named_parameters():
            prefix, _, leaf = name.rpartition(".")
            if not prefix.endswith(".mlp.experts") or name in self.stored:
                yield name, tuple(parameter.shape), parameter, ...
                continue
            rows = {"gate": slice(0, self.width), "up": slice(self.width, None)}
            for expert in range(parameter.shape[0]):
                places = rows if leaf == "gate_up_proj" else {"down": slice(None)}
                for kind, place in places.items():
                    shape = tuple(parameter[expert, place].shape)
                    yield f"{prefix}.{expert}.{kind}_proj.weight", shape, parameter, (expert, place)

    def check_names(self) -> None:
        """Refuse missing, extra and misshapen tensors, from the headers alone."""
        expected = {name: shape for name, shape, _, _ in self.pieces()}
        if self.is_tied:
            expected.setdefault("lm_head.weight", expected["model.embed_tokens.weight"])
        for name, shape in expected.items():
            if name not in self.stored:
                if name == "lm_head.weight" and self.is_tied:
                    continue
                raise CheckpointError(
                    f"{self.reader.path}: tensor '{name}' is missing; expected shape {list(shape)}{self._hint(name)}"
                )
            found = self.reader.shape(self.stored[name])
            if found != shape:
                raise CheckpointError(f"{self._where(name)}: found shape {list(found)}, expected {list(shape)}")
            kind = self.reader.dtype_name(self.stored[name])
            if kind not in _FLOATS:
                raise CheckpointError(f"{self._where(name)}: found type {kind}, expected one of {', '.join(_FLOATS)}")
        for name in self.stored:
            if name not in expected:
                raise CheckpointError(f"{self._where(name)}: {_why_extra(name)}")

    def fill(self) -> None:
        """Copy every tensor into its place, refusing values that are not finite."""
        for name, _, parameter, place in self.pieces():
            self._copy(name, parameter.data[place])
        if self.is_tied and "lm_head.weight" in self.stored:
            head = self.reader.get(self.stored["lm_head.weight"])
            if not torch.equal(head.to(self.model.lm_head.weight.dtype), self.model.lm_head.weight.data.cpu()):
                raise CheckpointError(
                    f"{self._where('lm_head.weight')}: differs from the embedding, though tie_word_embeddings is true"
                )

    def _copy(self, name: str, target: torch.Tensor) -> None:
        target.copy_(self.reader.get(self.stored[name]))
        low, high = torch.aminmax(target)
        if not bool(torch.isfinite(low) & torch.isfinite(high)):
            bad = int((~torch.isfinite(target)).sum())
            raise CheckpointError(
                f"{self._where(name)}: {bad} of {target.numel()} values are not finite in {target.dtype}; expected none"
            )

    def _where(self, name: str) -> str:
        stored = self.stored[name]
        return f"{self.reader.file_of(stored)}: tensor '{stored}'"

    def _hint(self, name: str) -> str:
        match = _EXPERT.match(name)
        if match is None:
            return ""
        return f" (or fused '{match[1]}.{'down_proj' if match[3] == 'down' else 'gate_up_proj'}')"


def save_laguna(
    source: nn.Module | Mapping[str, torch.Tensor],
    config: LagunaConfig,
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 4 << 30,
) -> None:
    """Write ``config.json`` and safetensors under Hugging Face's names, experts one by one; readers never see a half.

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
            raise CheckpointError(f"{folder}: tensor '{name}' has values that are not finite; nothing was written")
        if shards[-1] and filled + written.nbytes > max_shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = written.clone() if written.data_ptr() == tensor.data_ptr() else written
        filled += written.nbytes
    first = next(iter(shards[0].values()))
    described = {**config.to_dict(), "dtype": str(first.dtype).removeprefix("torch.")}
    _write_shards(folder, shards)
    _replace(folder / "config.json", lambda file: file.write_text(json.dumps(described, indent=2) + "\n"))


def _write_shards(folder: Path, shards: list[dict[str, torch.Tensor]]) -> None:
    count, index = len(shards), folder / "model.safetensors.index.json"
    files = ["model.safetensors"] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    for file, tensors in zip(files, shards, strict=True):

        def write(target: Path, tensors: dict[str, torch.Tensor] = tensors) -> None:
            save_file(tensors, str(target), metadata={"format": "pt"})

        _replace(folder / file, write)
    if count > 1:
        total = sum(tensor.nbytes for tensors in shards for tensor in tensors.values())
        weight_map = {name: file for file, tensors in zip(files, shards, strict=True) for name in tensors}
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}, indent=2)
        _replace(index, lambda file: file.write_text(text + "\n"))
    else:
        index.unlink(missing_ok=True)
    for stale in folder.glob("model*.safetensors"):
        if stale.name not in files:
            stale.unlink()


def _replace(file: Path, write: Any) -> None:
    unfinished = file.with_name(f".{file.name}.unfinished")
    try:
        write(unfinished)
        os.replace(unfinished, file)
    finally:
        unfinished.unlink(missing_ok=True)


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


def _canonical_names(reader: CheckpointReader) -> dict[str, str]:
    """Map our parameter names, or names of single experts, to the names in the files."""
    names = [name for name in reader.names() if not _IGNORED.search(name)]
    embeddings = [name for name in names if name == _EMBEDDING or name.endswith("." + _EMBEDDING)]
    if len(embeddings) != 1:
        found = ", ".join(embeddings) or "none"
        raise CheckpointError(
            f"{reader.path}: expected one tensor 'model.{_EMBEDDING}' (also below a prefix such as 'language_model.'), "
            f"found {found}"
        )
    body = embeddings[0].removesuffix(_EMBEDDING)
    canonical: dict[str, str] = {}
    for name in names:
        if name == "lm_head.weight" or (name.endswith(".lm_head.weight") and body.startswith(name[: -len("lm_head.weight")])):
            ours = "lm_head.weight"
        elif name.startswith(body):
            ours = "model." + name[len(body) :]
        else:
            raise CheckpointError(
                f"{reader.file_of(name)}: tensor '{name}' is unexpected: all but lm_head begin with '{body}' here"
            )
        for theirs, respelled in _RESPELLED:
            ours = ours.replace(theirs, respelled)
        if ours in canonical:
            raise CheckpointError(f"{reader.file_of(name)}: tensor '{name}' is also stored as '{canonical[ours]}'")
        canonical[ours] = name
    return canonical


def _infer_gating(given: dict[str, Any], reader: CheckpointReader, stored: Mapping[str, str]) -> None:
    """Read each layer's gate from the width of ``g_proj`` where the config does not say; family members differ."""
    layers = given.get("num_hidden_layers")
    if given.get("gating_types") is not None or "gating" in given or not isinstance(layers, int):
        return
    modes = []
    for i in range(layers):
        name = stored.get(f"model.layers.{i}.self_attn.g_proj.weight")
        query = stored.get(f"model.layers.{i}.self_attn.q_proj.weight")
        if name is None or query is None:
            modes.append("off")
            continue
        modes.append("per-element" if reader.shape(name)[0] == reader.shape(query)[0] else "per-head")
    given["gating_types"] = modes


def _why_extra(name: str) -> str:
    if name.endswith((".sink", ".sinks")):
        return "attention sinks are not supported"
    if name.endswith(".bias"):
        return "biases are not supported"
    if name.endswith(("_scale", "_packed", "_zero_point", ".scales", ".qweight")):
        return "belongs to a quantised checkpoint, which is not supported yet; expected unquantised weights"
    return "is unexpected: the config describes no such tensor"


def _refuse_quantised(given: Mapping[str, Any], file: Path) -> None:
    for key in ("quantization_config", "quantization"):
        if given.get(key) is not None:
            method = given[key].get("quant_method", given[key].get("mode")) if isinstance(given[key], Mapping) else None
            raise CheckpointError(
                f"{file}: {key} ({method or 'unnamed method'}) is not supported yet; expected an unquantised checkpoint "
                "(bfloat16, float16 or float32)"
            )


def _resolve_attention_factor(config: LagunaConfig, override: float | None, file: Path) -> LagunaConfig:
    rope = config.full_rope
    if override is not None:
        if rope.rope_type != "yarn":
            raise ConfigError(f"{file}: attention_factor applies to yarn only; full-attention layers use {rope.rope_type}")
        if not override > 0:
            raise ConfigError(f"attention_factor must be above 0, found {override!r}")
        return dataclasses.replace(config, full_rope=dataclasses.replace(rope, attention_factor=float(override)))
    if rope.rope_type == "yarn" and rope.attention_factor == 1.0 and rope.factor > 1:
        formula = dataclasses.replace(rope, attention_factor=None).attention_scaling
        warnings.warn(
            f"{file}: attention_factor is 1.0 with a YaRN factor of {rope.factor:g}, and is used as given; some engines "
            f"use the formula's {formula:.16g} instead; pass attention_factor={formula:.16g} to do so",
            stacklevel=3,
        )
    return config
