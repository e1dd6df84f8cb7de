"""What a checkpoint's weights are and how they are stored, from its config and headers, or a config alone.

No value is read and no torch imported, so that a 70 GB checkpoint is known in under a second.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from lean_laguna.core.drafter_config import DFlashConfig
from lean_laguna.core.model_config import LagunaConfig, config_path, read_config_json
from lean_laguna.core.safetensors_header import DTYPE_BITS
from lean_laguna.plan.modules import (
    CLASSES,
    Module,
    ModuleClass,
    drafter_modules,
    module_class,
    target_modules,
)
from lean_laguna.quant.config import QuantizationConfig, read_quantization
from lean_laguna.quant.scheme import WeightScheme

Header = Mapping[str, Mapping[str, Any]]
"""Tensor names to their entries in a safetensors header."""
SchemeOf = Callable[[Module], WeightScheme | None]
SchemeByName = Callable[[str], WeightScheme | None]
FLOATS = ("F32", "BF16", "F16", "F64")
"""Number formats of weights that are not quantised."""
_NEVER_QUANTISED = ("norms", "embedding", "router", "other")
_FLOATS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_LEAVES = frozenset(
    """
    weight weight_packed weight_scale weight_scale_2 weight_scale_inv weight_global_scale weight_zero_point
    weight_shape weight_g_idx input_scale input_global_scale k_scale v_scale scales biases bias
    """.split()
)
_NOT_READ = ("weight_shape", "input_scale", "input_global_scale")
_BORROWED = ("embed_tokens", "verifier_lm_head", "verifier_norm")
_PREFIXES = ("language_model.", "model.")


@dataclass(frozen=True)
class WeightGroup:
    """Weights of one class in one number format.

    Attributes:
        module_class: What they are part of.
        number_format: ``BF16``, ``NVFP4``, ``FP8 block 128x128`` ...
        num_modules: Matrices and vectors.
        num_weights: Values.
        stored_bytes: Bytes on disk, and in memory where they stay packed.
        read_bytes: Bytes that one pass over all of them reads.
    """

    module_class: ModuleClass
    number_format: str
    num_modules: int
    num_weights: int
    stored_bytes: int
    read_bytes: int


@dataclass(frozen=True)
class Inventory:
    """The weights of one network, by class and format.

    Attributes:
        groups: In the order of ``CLASSES``.
        has_fp8_kv: The checkpoint means keys and values to be kept in FP8.
        problems: Where config and tensors disagree.
    """

    groups: tuple[WeightGroup, ...]
    has_fp8_kv: bool = False
    problems: tuple[str, ...] = field(default=())

    def read_bytes(self, kind: ModuleClass) -> int:
        """Bytes that one pass over all weights of a class reads."""
        return sum(group.read_bytes for group in self.groups if group.module_class == kind)

    def num_weights(self, *kinds: ModuleClass) -> int:
        """Values in some classes; in all where none is given."""
        return sum(group.num_weights for group in self.groups if not kinds or group.module_class in kinds)

    def formats(self, kind: ModuleClass) -> tuple[str, ...]:
        """Number formats that a class is stored in, the one with most weights first."""
        groups = [group for group in self.groups if group.module_class == kind]
        return tuple(group.number_format for group in sorted(groups, key=lambda g: -g.num_weights))

    @property
    def stored_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(group.stored_bytes for group in self.groups)


@dataclass(frozen=True)
class _Entry:
    """A module as stored."""

    module_class: ModuleClass
    number_format: str
    num_weights: int
    stored_bytes: int
    read_bytes: int


def plain_format(config: Mapping[str, Any]) -> str:
    """Return the number format of unquantised weights that a config.json states, as safetensors spells it."""
    return _FLOATS.get(str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch."), "BF16")


def scheme_lookup(quantization: QuantizationConfig | None) -> SchemeByName:
    """Return what tells a module's scheme by its ``plain_name`` and remembers it: target lists are long."""
    if quantization is None:
        return lambda name: None
    return functools.cache(lambda name: quantization.scheme_of(f"model.{name}", name))


def target_from_config(given: Mapping[str, Any], where: str) -> tuple[LagunaConfig, Inventory]:
    """Describe a target from its parsed config.json.

    Raises:
        ConfigError: A value is wrong, or the quantisation is of a kind that is not known.
    """
    config = LagunaConfig.from_dict(given, where)
    quantization = read_quantization(given, where)
    inventory = from_modules(
        target_modules(config),
        lambda module: quantization.scheme_of(module.name) if quantization and module.is_linear else None,
        plain_format(given),
    )
    return config, dataclasses.replace(inventory, has_fp8_kv=bool(quantization and quantization.has_fp8_kv))


def target_from_headers(
    folder: Path, header: Header, scheme_of: SchemeByName | None = None
) -> tuple[LagunaConfig, Inventory]:
    """Describe a target from its config.json and what its files hold.

    Args:
        folder: Checkpoint folder.
        header: All tensors of all its shards.
        scheme_of: ``scheme_lookup`` of its config, where the caller has one already.

    Raises:
        CheckpointError: The config is missing or not JSON.
        ConfigError: A value is wrong, or the quantisation is of a kind that is not known.
    """
    given, where = read_config_json(folder), str(config_path(folder))
    config = LagunaConfig.from_dict(given, where)
    quantization = read_quantization(given, where)
    inputs = {plain_name(m.name): m.shape for m in target_modules(config)}
    entries, problems = _stored(header, module_class, scheme_of or scheme_lookup(quantization), inputs)
    return config, Inventory(
        _grouped(entries), bool(quantization and quantization.has_fp8_kv), tuple(problems)
    )


def drafter_from_headers(header: Header, scheme_of: SchemeByName) -> Inventory:
    """Describe a drafter from what its files hold, without copies of the target's weights.

    Args:
        header: All its tensors.
        scheme_of: ``scheme_lookup`` of its config.
    """
    kept = {
        name: entry
        for name, entry in header.items()
        if not any(part in name for part in _BORROWED) and name.rpartition(".")[2] not in ("t2d", "d2t")
    }
    if not any(name.endswith("d2t") for name in header):
        kept = {name: entry for name, entry in kept.items() if not name.endswith("lm_head.weight")}
    entries, _ = _stored(kept, lambda _: "drafter", scheme_of, {})
    return Inventory(_grouped(entries))


def drafter_from_config(config: DFlashConfig) -> Inventory:
    """Describe an unquantised drafter from its configuration."""
    return from_modules(drafter_modules(config), lambda _: None, "BF16")


def from_modules(modules: Iterable[Module], scheme_of: SchemeOf, plain: str) -> Inventory:
    """Describe the weights of a network that is stored as ``scheme_of`` says.

    Args:
        modules: Its modules.
        scheme_of: A module's scheme, None where it is not quantised.
        plain: Number format of the others.
    """
    entries = []
    known: dict[tuple[int, tuple[int, ...]], tuple[int, int]] = {}  # a model has few shapes, and many modules
    for module in modules:
        scheme, num_weights = scheme_of(module), module.num_weights
        name, stored = plain, (num_weights * DTYPE_BITS[plain] // 8,) * 2
        if scheme is not None:
            key = (id(scheme), module.shape)
            if key not in known:
                rows, columns = module.shape
                known[key] = scheme.stored_bytes(rows, columns), scheme.read_bytes(rows, columns)
            name, stored = scheme.name, known[key]
        entries.append(_Entry(module.module_class, name, num_weights, *stored))
    return Inventory(_grouped(entries))


def _stored(
    header: Header,
    class_of: Callable[[str], ModuleClass],
    scheme_of: SchemeByName,
    shapes: Mapping[str, tuple[int, ...]],
) -> tuple[list[_Entry], list[str]]:
    modules: dict[str, dict[str, Mapping[str, Any]]] = {}
    for name, entry in header.items():
        module, _, leaf = name.rpartition(".")
        if leaf not in _LEAVES:
            module, leaf = name, "weight"
        modules.setdefault(module, {})[leaf] = entry
    entries, problems = [], []
    for module, leaves in modules.items():
        plain, kind = plain_name(module), class_of(module)
        weight = leaves.get("weight_packed") or leaves.get("weight") or {"dtype": "F32", "shape": (0,)}
        scheme = scheme_of(plain)
        number_format, problem = _number_format(kind, str(weight["dtype"]), scheme)
        if problem:
            problems.append(f"{module}: {problem}")
        sizes = {leaf: _num_bytes(entry) for leaf, entry in leaves.items()}
        read = sum(size for leaf, size in sizes.items() if leaf not in _NOT_READ)
        num_weights = prod(shapes.get(plain) or weight["shape"])
        if plain not in shapes and scheme is not None and number_format == scheme.name:
            num_weights = num_weights * DTYPE_BITS[weight["dtype"]] // scheme.num_bits
        entries.append(_Entry(kind, number_format, num_weights, sum(sizes.values()), read))
    return entries, problems


def _number_format(kind: ModuleClass, dtype: str, scheme: WeightScheme | None) -> tuple[str, str | None]:
    """Return how a module is stored, and what is wrong with that."""
    if dtype in FLOATS:
        is_wrong = scheme is not None and kind not in _NEVER_QUANTISED
        return (
            dtype,
            f"the config says {scheme.name}, its file holds {dtype}" if scheme and is_wrong else None,
        )
    if scheme is None:
        return f"quantised ({dtype})", "stored quantised, which the config does not say"
    return scheme.name, None


def plain_name(name: str) -> str:
    """Return a module's name without prefixes and in one spelling, to find it in another list."""
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            name = name[len(prefix) :]
    if ".mlp.shared_experts." in name or name.endswith(".mlp.gate.e_score_correction_bias"):
        return name.replace(".mlp.shared_experts.", ".mlp.shared_expert.").replace(
            ".mlp.gate.e_score_correction_bias", ".mlp.experts.e_score_correction_bias"
        )
    return name


def _num_bytes(entry: Mapping[str, Any]) -> int:
    start, end = entry["data_offsets"]
    return int(end) - int(start)


def _grouped(entries: Iterable[_Entry]) -> tuple[WeightGroup, ...]:
    sums: dict[tuple[ModuleClass, str], list[int]] = {}
    for entry in entries:
        total = sums.setdefault((entry.module_class, entry.number_format), [0, 0, 0, 0])
        for i, value in enumerate((1, entry.num_weights, entry.stored_bytes, entry.read_bytes)):
            total[i] += value
    groups = [WeightGroup(*key, *total) for key, total in sums.items()]
    return tuple(sorted(groups, key=lambda g: (CLASSES.index(g.module_class), -g.num_weights)))
