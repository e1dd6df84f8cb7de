"""A quantised checkpoint read as if it were not: each quantised linear appears under its weight's plain name.

Which modules are quantised is told by config and tensors together, and where they disagree, or a scale is
missing, zero, not finite or upside down, the tensor is named. How codes make numbers: package ``quant``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lean_laguna.core.errors import CheckpointError, ConfigError
from lean_laguna.models.safetensors_reader import CheckpointReader
from lean_laguna.quant.codec import to_packed
from lean_laguna.quant.config import QuantizationConfig, read_quantization
from lean_laguna.quant.packed import PackedWeight
from lean_laguna.quant.scale_checks import check_codes, check_scale
from lean_laguna.quant.scheme import WeightScheme

_CODES = ("weight_packed", "weight")
_SCALES = ("weight_scale", "weight_scale_inv", "weight_scale_2", "weight_global_scale")
_INPUT_SCALES = ("input_scale", "input_global_scale")
_REST = ("weight_zero_point", "weight_shape", "weight_g_idx", "input_zero_point")
_PARTS = frozenset(("weight_packed", *_SCALES, *_INPUT_SCALES, *_REST))
_KV_SCALE = re.compile(r"^(.*\.self_attn)\.(?:([kv])_proj\.(?:[kv]_scale|output_scale)|([kv])_scale)$")
_PREFIXES = ("language_model.", "model.")
_FLOATS = ("F32", "BF16", "F16")
# Modules that are not Linear in Hugging Face's model: a target such as ``Linear`` does not mean them.
_NOT_LINEAR = (
    ("embed_tokens", "Embedding"),
    (".mlp.gate", "LagunaTopKRouter"),
    ("norm", "LagunaRMSNorm"),
)


@dataclass(frozen=True)
class _Quantised:
    """One quantised weight: its scheme, its shape, and the names of its tensors by their last part."""

    scheme: WeightScheme
    shape: tuple[int, int]
    parts: Mapping[str, str]


class QuantisedReader(CheckpointReader):
    """Tensors of a checkpoint by logical name; quantised ones are decoded as they are read."""

    def __init__(self, path: str | Path, config: QuantizationConfig):
        """Open a folder and match its tensors with its config.

        Raises:
            CheckpointError: A file is damaged, or the tensors of a quantised weight are missing, misshapen or
                of another kind than the config says; names the tensor.
        """
        super().__init__(path)
        self._config = config
        self._quantised: dict[str, _Quantised] = {}
        self._kv_names: dict[str, str] = {}
        modules: dict[str, dict[str, str]] = {}
        for name in super().names():
            match = _KV_SCALE.match(name)
            if match is not None:
                self._kv_names[f"{match[1]}.{match[2] or match[3]}_scale"] = name
                continue
            module, _, part = name.rpartition(".")
            if part == "weight" or part in _PARTS:
                modules.setdefault(module, {})[part] = name
        for module, parts in modules.items():
            entry = self._entry(module, parts)
            if entry is not None:
                self._quantised[f"{module}.weight"] = entry
        hidden = {name for entry in self._quantised.values() for name in entry.parts.values()}
        hidden |= set(self._kv_names.values())
        self._names = sorted((set(super().names()) - hidden) | set(self._quantised))

    def names(self) -> list[str]:
        """Logical names, sorted: a quantised weight counts once, as ``<module>.weight``."""
        return self._names

    def file_of(self, name: str) -> Path:
        """Return the file that holds a tensor, or a quantised weight's codes."""
        return super().file_of(self._stored(name))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, or of a quantised weight once decoded."""
        entry = self._quantised.get(name)
        return super().shape(name) if entry is None else entry.shape

    def dtype_name(self, name: str) -> str:
        """Number format of a tensor; a quantised weight counts as float32, which it decodes to."""
        return "F32" if name in self._quantised else super().dtype_name(name)

    def scheme_of(self, name: str) -> WeightScheme | None:
        """Return how a weight is stored, None where it is not quantised."""
        entry = self._quantised.get(name)
        return None if entry is None else entry.scheme

    def parts_of(self, name: str) -> Mapping[str, str]:
        """Return the names in the files of a quantised weight's tensors, by their last part."""
        return self._quantised[name].parts

    def get(self, name: str) -> Tensor:
        """Return a tensor, decoded to float32 where it is quantised.

        Raises:
            CheckpointError: It cannot be read, or its scales are unusable.
        """
        return self.packed(name).decode() if name in self._quantised else super().get(name)

    def copy_to(self, name: str, target: Tensor) -> None:
        """Copy a tensor into ``target``, decoding a quantised one piece by piece.

        Raises:
            CheckpointError: As ``get``.
        """
        if name in self._quantised:
            self.packed(name).decode_into(target)
        else:
            super().copy_to(name, target)

    def packed(self, name: str) -> PackedWeight:
        """Return a quantised weight with its codes and scales, which are checked.

        Raises:
            CheckpointError: It cannot be read, a scale is zero, negative, not finite or upside down, or a
                code is not a number.
        """
        entry = self._quantised[name]
        tensors = {part: super(QuantisedReader, self).get(stored) for part, stored in entry.parts.items()}
        for part in (*_SCALES, *_INPUT_SCALES):
            if part in tensors:
                check_scale(tensors[part], part, entry.scheme, self._where(entry.parts[part]))
        if entry.scheme.number == "fp8":
            check_codes(tensors["weight"], self._where(entry.parts["weight"]))
        return to_packed(tensors, entry.scheme, entry.shape)

    def kv_scales(self) -> dict[str, float]:
        """Return the FP8 cache's scales, by name: ``<layer>.self_attn.k_scale`` and ``v_scale``.

        Raises:
            CheckpointError: One is not a number above 0.
        """
        found: dict[str, float] = {}
        for name, stored in self._kv_names.items():
            tensor = super().get(stored)
            if tensor.numel() != 1 or not bool(torch.isfinite(tensor.float()).all()) or not tensor.item() > 0:
                raise CheckpointError(
                    f"{self._where(stored)}: expected one finite number above 0, found {tensor.tolist()}"
                )
            found[name] = float(tensor.item())
        return found

    def _stored(self, name: str) -> str:
        entry = self._quantised.get(name)
        return name if entry is None else next(entry.parts[part] for part in _CODES if part in entry.parts)

    def _where(self, stored: str) -> str:
        return f"{CheckpointReader.file_of(self, stored)}: tensor '{stored}'"

    def _entry(self, module: str, parts: dict[str, str]) -> _Quantised | None:
        kind = next((kind for end, kind in _NOT_LINEAR if module.endswith(end)), "Linear")
        scheme = self._config.scheme_of(*spellings(module), kind=kind)
        is_plain = set(parts) == {"weight"} and self._type(parts["weight"]) in (*_FLOATS, "F64")
        first = next(iter(parts.values()))
        if scheme is None:
            if set(parts) == {"weight"} and is_plain:
                return None
            odd = next((name for part, name in parts.items() if part in _PARTS), first)
            raise CheckpointError(
                f"{self._where(odd)}: belongs to a quantised weight, but {self._config.where} does not say "
                f"how '{module}' is quantised; expected a group with a target for it, not "
                "ignored"
            )
        if is_plain:
            if kind != "Linear" or len(CheckpointReader.shape(self, first)) != 2:
                return None
            raise CheckpointError(
                f"{self._where(first)}: found {self._type(first)}, but {self._config.where} says that "
                f"'{module}' is stored as {scheme.name}; expected its codes and scales, or the "
                "module in 'ignore'"
            )
        scheme = _as_spelt(scheme, parts)
        return _Quantised(scheme, self._check_parts(module, scheme, parts), parts)

    def _check_parts(self, module: str, scheme: WeightScheme, parts: dict[str, str]) -> tuple[int, int]:
        codes = next((part for part in _CODES if part in parts), None)
        if codes is None:
            raise self._missing(module, scheme, "weight_packed" if scheme.num_bits == 4 else "weight")
        shape = self._logical_shape(scheme, parts, codes)
        try:
            expected = scheme.tensors(*shape)
        except ConfigError as error:
            raise CheckpointError(f"{self._where(parts[codes])}: {error}") from None
        for part, spec in expected.items():
            if part not in parts:
                if part == "weight_shape":  # older checkpoints leave it out; the other tensors tell
                    continue
                raise self._missing(module, scheme, part)
            found = CheckpointReader.shape(self, parts[part])
            if _squeezed(found) != _squeezed(spec.shape):
                raise CheckpointError(
                    f"{self._where(parts[part])}: found shape {list(found)}, expected {list(spec.shape)} for "
                    f"{scheme.name} of shape {list(shape)}"
                )
            accepted: tuple[str, ...] = (spec.dtype,)
            if spec.dtype == "BF16" or part in (*_INPUT_SCALES, "weight_global_scale", "weight_scale_2"):
                accepted = _FLOATS
            elif part == "weight_shape":
                accepted = ("I64", "I32")
            if self._type(parts[part]) not in accepted:
                raise CheckpointError(
                    f"{self._where(parts[part])}: found type {self._type(parts[part])}, expected "
                    f"{' or '.join(accepted)} for {scheme.name}"
                )
        return shape

    def _logical_shape(self, scheme: WeightScheme, parts: dict[str, str], codes: str) -> tuple[int, int]:
        stored = CheckpointReader.shape(self, parts[codes])
        if len(stored) != 2:
            raise CheckpointError(
                f"{self._where(parts[codes])}: found shape {list(stored)}, expected two dimensions"
            )
        rows, width = stored
        if scheme.storage != "pack-quantized":
            return rows, width * (2 if scheme.number == "fp4" else 1)
        fits = width * 32 // scheme.num_bits
        if "weight_shape" not in parts:
            return rows, fits
        said = super().get(parts["weight_shape"]).flatten().tolist()
        if len(said) != 2 or said[0] != rows or -(-said[1] * scheme.num_bits // 32) != width:
            raise CheckpointError(
                f"{self._where(parts['weight_shape'])}: found {said}, which does not fit '{parts[codes]}' of "
                f"shape {list(stored)}"
            )
        return rows, said[1]

    def _missing(self, module: str, scheme: WeightScheme, part: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}: tensor '{module}.{part}' is missing; {self._config.where} says that '{module}' is "
            f"stored as {scheme.name}"
        )

    def _type(self, stored: str) -> str:
        return CheckpointReader.dtype_name(self, stored)


def open_checkpoint(path: str | Path, config: Mapping[str, Any], where: str) -> CheckpointReader:
    """Open a checkpoint's tensors under their plain names, quantised or not.

    Args:
        path: Folder.
        config: Its parsed ``config.json``.
        where: The config's path, for errors.

    Raises:
        CheckpointError: A file is damaged, or tensors and config disagree.
        ConfigError: The quantisation is of a kind that is not supported.
    """
    quantization = read_quantization(config, where)
    return CheckpointReader(path) if quantization is None else QuantisedReader(path, quantization)


def spellings(module: str) -> tuple[str, ...]:
    """Return the names under which a config may mean a stored module: with and without its prefixes."""
    plain = module
    for prefix in _PREFIXES:
        plain = plain.removeprefix(prefix)
    return tuple(dict.fromkeys((module, f"model.{plain}", plain, module.removeprefix("language_model."))))


def _as_spelt(scheme: WeightScheme, parts: Mapping[str, str]) -> WeightScheme:
    """Return a scheme with the spelling of the tensors that are there."""
    if scheme.number == "fp4" and ("weight_scale_2" in parts or "weight_global_scale" in parts):
        is_modelopt = "weight_scale_2" in parts
        return dataclasses.replace(scheme, spelling="modelopt" if is_modelopt else "compressed-tensors")
    if scheme.number == "fp8" and ("weight_scale_inv" in parts or "weight_scale" in parts):
        is_inverse = "weight_scale_inv" in parts
        return dataclasses.replace(scheme, spelling="fp8" if is_inverse else "compressed-tensors")
    return scheme


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape without a last 1: a scale per row is [N] or [N, 1], one alone [] or [1]."""
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape
