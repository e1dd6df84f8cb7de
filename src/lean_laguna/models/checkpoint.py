"""Weights of a target from Hugging Face folders, in any spelling of the family; out: ``checkpoint_writer``.

Source: tensor names of poolside/Laguna-XS.2, XS-2.1, S-2.1 and of transformers' ``save_pretrained``.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lean_laguna.core.config_reader import ConfigReader
from lean_laguna.core.errors import CheckpointError, ConfigError
from lean_laguna.core.model_config import LagunaConfig, config_path, read_config_json
from lean_laguna.core.rope_config import LEAST_ATTENTION_FACTOR, MOST_ATTENTION_FACTOR, is_attention_factor
from lean_laguna.models.checkpoint_writer import save_laguna
from lean_laguna.models.laguna import LagunaForCausalLM
from lean_laguna.models.packed_parameters import materialise, pack_parameters
from lean_laguna.models.quantised_reader import QuantisedReader, open_checkpoint
from lean_laguna.models.safetensors_reader import CheckpointReader
from lean_laguna.models.unset import on_meta

__all__ = ["CheckpointReader", "check_laguna", "load_laguna", "load_target_config", "save_laguna"]

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
        CheckpointError: The config is missing or not JSON.
        ConfigError: A field is wrong.
    """
    given, file = read_config_json(path), config_path(path)
    return _resolve_attention_factor(LagunaConfig.from_dict(given, str(file)), attention_factor, file)


def load_laguna(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    attention_factor: float | None = None,
    keep_packed: bool = False,
) -> LagunaForCausalLM:
    """Load a target, tensor by tensor from mapped files, so that no second copy is ever in memory.

    Args:
        path: Checkpoint folder with ``config.json`` and safetensors, quantised or not.
        dtype: Number format in memory; files may hold another. Quantised weights are decoded to it.
        device: Where the weights go.
        attention_factor: Replaces YaRN's factor on cos and sin of full-attention layers.
        keep_packed: Keep quantised weights as they are, in ``packed_weights``; their parameters stay on the
            ``meta`` device, so that only kernels for packed weights can run the target.

    Returns:
        The target, in evaluation mode, without gradients.

    Raises:
        CheckpointError: A file or tensor is missing, extra, misshapen, damaged or not finite; names the file,
            the tensor, what was found and what was expected.
        ConfigError: A config field is wrong; names file, field, value found and values accepted.
    """
    loader = _matched(path, attention_factor)
    model, reader = loader.model, loader.reader
    model.to(dtype)
    packed = pack_parameters(loader.sources(), reader, device) if keep_packed else {}
    is_for_kernels = keep_packed and torch.device(device).type == "cuda"
    materialise(model, device, packed, model.read_together() if is_for_kernels else None)
    model.packed_weights = packed
    if isinstance(reader, QuantisedReader):
        model.kv_scales = reader.kv_scales()
    with torch.no_grad():
        loader.fill(leave=packed)
    reader.close()
    return model


def check_laguna(path: str | Path) -> None:
    """Hold a target's config and the headers of its files against each other; no weight is read.

    Raises:
        CheckpointError: As for ``load_laguna``, as far as headers tell.
        ConfigError: A config field is wrong.
    """
    _matched(path, None)


def _matched(path: str | Path, attention_factor: float | None) -> _Loader:
    """Return a target on the ``meta`` device and the tensors that belong into it."""
    given, file = read_config_json(path), config_path(path)
    ConfigReader(given, str(file)).refuse_other_architectures()  # a drafter has other tensors
    reader = open_checkpoint(path, given, str(file))
    stored = _canonical_names(reader)
    _infer_gating(given, reader, stored)
    config = _resolve_attention_factor(LagunaConfig.from_dict(given, str(file)), attention_factor, file)
    model = on_meta(lambda: LagunaForCausalLM(config))
    loader = _Loader(reader, stored, model)
    loader.check_names()
    return loader


class _Loader:
    """Matches the tensors of files with the parameters of a model."""

    def __init__(self, reader: CheckpointReader, stored: Mapping[str, str], model: LagunaForCausalLM):
        self.reader, self.stored, self.model = reader, dict(stored), model
        self.is_tied = model.config.tie_word_embeddings
        self.width = model.config.moe_intermediate_size

    def pieces(self) -> Iterator[tuple[str, tuple[int, ...], nn.Parameter, Any]]:
        """Yield canonical tensor name, expected shape, parameter and the tensor's place in it."""
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

    def sources(self) -> dict[str, list[tuple[str, Any]]]:
        """Return the names in the files that make each parameter, with their places in it."""
        found: dict[str, list[tuple[str, Any]]] = {}
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        for name, _, parameter, place in self.pieces():
            if name in self.stored:
                found.setdefault(names[id(parameter)], []).append((self.stored[name], place))
        return found

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
                    f"{self.reader.path}: tensor '{name}' is missing; expected shape {list(shape)}"
                    f"{self._hint(name)}"
                )
            found = self.reader.shape(self.stored[name])
            if found != shape:
                raise CheckpointError(
                    f"{self._where(name)}: found shape {list(found)}, expected {list(shape)}"
                )
            kind = self.reader.dtype_name(self.stored[name])
            if kind not in _FLOATS:
                raise CheckpointError(
                    f"{self._where(name)}: found type {kind}, expected one of {', '.join(_FLOATS)}"
                )
        for name in self.stored:
            if name not in expected:
                raise CheckpointError(f"{self._where(name)}: {_why_extra(name)}")

    def fill(self, leave: Container[str] = ()) -> None:
        """Copy every tensor into its place but for ``leave``, refusing values that are not finite."""
        left = {id(parameter) for name, parameter in self.model.named_parameters() if name in leave}
        for name, _, parameter, place in self.pieces():
            if id(parameter) not in left:
                self._copy(name, parameter.data[place])
        if self.is_tied and "lm_head.weight" in self.stored:
            head = self.reader.get(self.stored["lm_head.weight"])
            ours = self.model.lm_head.weight.data.cpu()
            if not torch.equal(head.to(ours.dtype), ours):
                raise CheckpointError(
                    f"{self._where('lm_head.weight')}: differs from the embedding, though "
                    "tie_word_embeddings is true; expected the same values or no such tensor"
                )

    def _copy(self, name: str, target: torch.Tensor) -> None:
        self.reader.copy_to(self.stored[name], target)
        low, high = torch.aminmax(target)
        if not bool(torch.isfinite(low) & torch.isfinite(high)):
            bad = int((~torch.isfinite(target)).sum())
            raise CheckpointError(
                f"{self._where(name)}: {bad} of {target.numel()} values are not finite in {target.dtype}; "
                "expected none"
            )

    def _where(self, name: str) -> str:
        stored = self.stored[name]
        return f"{self.reader.file_of(stored)}: tensor '{stored}'"

    def _hint(self, name: str) -> str:
        match = _EXPERT.match(name)
        if match is None:
            return ""
        return f" (or fused '{match[1]}.{'down_proj' if match[3] == 'down' else 'gate_up_proj'}')"


def _canonical_names(reader: CheckpointReader) -> dict[str, str]:
    """Map our parameter names, or names of single experts, to the names in the files."""
    names = [name for name in reader.names() if not _IGNORED.search(name)]
    embeddings = [name for name in names if name == _EMBEDDING or name.endswith("." + _EMBEDDING)]
    if len(embeddings) != 1:
        found = ", ".join(embeddings) or "none"
        raise CheckpointError(
            f"{reader.path}: expected one tensor 'model.{_EMBEDDING}' (also below a prefix such as "
            f"'language_model.'), found {found}"
        )
    body = embeddings[0].removesuffix(_EMBEDDING)
    canonical: dict[str, str] = {}
    for name in names:
        if name == "lm_head.weight" or (
            name.endswith(".lm_head.weight") and body.startswith(name[: -len("lm_head.weight")])
        ):
            ours = "lm_head.weight"
        elif name.startswith(body):
            ours = "model." + name[len(body) :]
        else:
            raise CheckpointError(
                f"{reader.file_of(name)}: tensor '{name}' is unexpected: all but lm_head begin with '{body}'"
            )
        for theirs, respelled in _RESPELLED:
            ours = ours.replace(theirs, respelled)
        if ours in canonical:
            raise CheckpointError(
                f"{reader.file_of(name)}: tensor '{name}' is also stored as '{canonical[ours]}'"
            )
        canonical[ours] = name
    return canonical


def _infer_gating(given: dict[str, Any], reader: CheckpointReader, stored: Mapping[str, str]) -> None:
    """Read each layer's gate from the width of ``g_proj`` where the config does not say."""
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
        return "belongs to a quantised weight, but config.json has no quantization_config"
    return "is unexpected: the config describes no such tensor"


def _resolve_attention_factor(config: LagunaConfig, override: float | None, file: Path) -> LagunaConfig:
    rope = config.full_rope
    if override is not None:
        if rope.rope_type != "yarn":
            raise ConfigError(
                f"{file}: attention_factor applies to yarn only; full-attention layers use {rope.rope_type}"
            )
        if not is_attention_factor(override):
            raise ConfigError(
                f"attention_factor must be a number from {LEAST_ATTENTION_FACTOR:g} to "
                f"{MOST_ATTENTION_FACTOR:g}, found {override!r}"
            )
        return dataclasses.replace(
            config, full_rope=dataclasses.replace(rope, attention_factor=float(override))
        )
    if rope.rope_type == "yarn" and rope.attention_factor == 1.0 and rope.factor > 1:
        formula = dataclasses.replace(rope, attention_factor=None).attention_scaling
        warnings.warn(
            f"{file}: attention_factor is 1.0 with a YaRN factor of {rope.factor:g}, and is used as "
            f"given; some engines use the formula's {formula:.16g} instead; pass "
            f"attention_factor={formula:.16g} to do so",
            stacklevel=3,
        )
    return config
