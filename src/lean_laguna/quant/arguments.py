"""Reads the entries of a group in ``quantization_config``: one weight's scheme and the KV cache's.

Source: compressed-tensors 0.20, quantization/quant_args.py and compressors/*/base.py (``can_compress``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast, get_args

from lean_laguna.core.errors import ConfigError, nearest, reject_unknown
from lean_laguna.quant.scheme import NVFP4_GROUP, Activations, Number, Storage, Strategy, WeightScheme

_KEYS = (
    "num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "dynamic", "observer",
    "observer_kwargs", "actorder", "scale_dtype", "zp_dtype", "is_mx",
)  # fmt: skip
_REFUSED_STORAGE = {
    "mxfp4-pack-quantized": "MXFP4",
    "mxfp6-pack-quantized": "MXFP6",
    "mxfp8-quantized": "MXFP8",
    "marlin-24": "2:4 sparsity",
    "sparse-24-bitmask": "2:4 sparsity",
    "sparse-bitmask": "sparsity",
    "dense": "weights that are not compressed",
    "fakequant": "weights that are not compressed",
}


def weight_scheme(weights: Any, activations: Any, storage: Any, where: str) -> WeightScheme:
    """Read how a group's weights are stored.

    Args:
        weights: The group's ``weights``.
        activations: Its ``input_activations``.
        storage: Its ``format``, or the model's; None to tell from the rest.
        where: The group, for errors.

    Raises:
        ConfigError: A key or value is wrong, or the combination is not supported.
    """
    given = _arguments(weights, f"{where}: weights")
    where = f"{where}: weights"
    number, bits = _number(given, where)
    strategy, size = _strategy(given, number, where)
    symmetric = _flag(given, "symmetric", True, where)
    if given.get("dynamic"):
        raise ConfigError(f"{where}: 'dynamic' must be false, found {given['dynamic']!r}")
    how = _activations(activations, where)
    layout = _storage(storage, number, bits, how, where)
    if number != "int" and not symmetric:
        raise ConfigError(f"{where}: 'symmetric' must be true for {number} weights, found false")
    block = _block(given, where) if strategy == "block" else None
    _check(number, bits, strategy, layout, size, where)
    return WeightScheme(number, bits, strategy, layout, symmetric, size, block, how)


def kv_scheme(given: Any, where: str) -> bool:
    """Return whether keys and values are meant to be kept in FP8.

    Raises:
        ConfigError: Another scheme than one e4m3 scale per layer for keys and one for values.
    """
    if given is None:
        return False
    values = _arguments(given, where)
    kind = str(values.get("type", "int")).lower()
    strategy = values.get("strategy") or "tensor"
    if values.get("num_bits", 8) != 8 or kind != "float" or str(strategy).lower() != "tensor":
        raise ConfigError(
            f"{where}: expected 8-bit float with one scale per layer (num_bits 8, type 'float', strategy "
            f"'tensor'), found {dict(values)!r}"
        )
    if values.get("symmetric", True) is not True:
        raise ConfigError(f"{where}: 'symmetric' must be true, found {values['symmetric']!r}")
    return True


def _arguments(given: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} must be a JSON object, found {given!r}")
    reject_unknown(given, _KEYS, where)
    return given


def _number(given: Mapping[str, Any], where: str) -> tuple[Number, int]:
    bits, kind = given.get("num_bits", 8), given.get("type", "int")
    word = kind.lower() if isinstance(kind, str) else kind
    if word == "float" and bits in (4, 8) and type(bits) is int:
        return ("fp4" if bits == 4 else "fp8"), bits
    if word == "int" and bits in (4, 8) and type(bits) is int:
        return "int", bits
    raise ConfigError(
        f"{where}: found num_bits {bits!r} of type {kind!r}; supported: 4 or 8 of type 'int' or 'float'"
    )


def _strategy(given: Mapping[str, Any], number: Number, where: str) -> tuple[Strategy, int | None]:
    size, word = given.get("group_size"), given.get("strategy")
    if size is not None and (type(size) is not int or (size < 1 and size != -1)):
        raise ConfigError(f"{where}: 'group_size' must be a whole number above 0, -1 or null, found {size!r}")
    if word is None:
        word = "tensor" if size is None else "channel" if size == -1 else "group"
    strategy = str(word).lower()
    if strategy not in get_args(Strategy):
        raise ConfigError(f"{where}: 'strategy' {word!r} is unknown{nearest(strategy, get_args(Strategy))}")
    if strategy == "group" and number == "fp4":
        strategy = "tensor_group"  # as compressed-tensors first spelt NVFP4
    has_groups = strategy in ("group", "tensor_group")
    if has_groups and (size is None or size < 1):
        raise ConfigError(f"{where}: strategy '{strategy}' needs a 'group_size' above 0, found {size!r}")
    return cast(Strategy, strategy), size if has_groups else None


def _storage(given: Any, number: Number, bits: int, how: Activations, where: str) -> Storage:
    if not isinstance(given, str | None):
        raise ConfigError(f"{where}: 'format' must be a text, found {given!r:.100}")
    if given in _REFUSED_STORAGE:
        raise ConfigError(
            f"{where}: format '{given}' ({_REFUSED_STORAGE[given]}) is not supported; supported: "
            f"{', '.join(get_args(Storage))}"
        )
    if given is None:
        if number == "fp4":
            return "nvfp4-pack-quantized"
        if number == "fp8":
            return "float-quantized" if how != "none" else "naive-quantized"
        return "int-quantized" if how != "none" and bits == 8 else "pack-quantized"
    if given not in get_args(Storage):
        raise ConfigError(f"{where}: format {given!r} is unknown{nearest(str(given), get_args(Storage))}")
    return cast(Storage, given)


def _activations(given: Any, where: str) -> Activations:
    if given is None:
        return "none"
    where = where.replace(": weights", ": input_activations")
    how = _arguments(given, where).get("dynamic", False)
    if how not in (True, False, "local", None):
        raise ConfigError(f"{where}: 'dynamic' must be true, false or 'local', found {how!r}")
    # "local" scales are dynamic below one stored scale of the tensor.
    return "dynamic" if how is True else "static"


def _block(given: Mapping[str, Any], where: str) -> tuple[int, int]:
    found = given.get("block_structure")
    sizes = found.lower().split("x") if isinstance(found, str) else found
    try:
        height, width = (int(size) for size in sizes or ())
    except (TypeError, ValueError):
        height = width = 0
    if height < 1 or width < 1:
        raise ConfigError(
            f"{where}: 'block_structure' must be two whole numbers as [128, 128], found {found!r}"
        )
    return height, width


def _flag(given: Mapping[str, Any], key: str, default: bool, where: str) -> bool:
    value = given.get(key, default)
    if not isinstance(value, bool):
        raise ConfigError(f"{where}: '{key}' must be true or false, found {value!r}")
    return value


def _check(
    number: Number, bits: int, strategy: Strategy, storage: Storage, size: int | None, where: str
) -> None:
    """Refuse combinations that no format has."""
    layouts: dict[str, tuple[str, ...]] = {
        "fp4": ("nvfp4-pack-quantized",),
        "fp8": ("float-quantized", "naive-quantized"),
        "int": ("pack-quantized", "int-quantized", "naive-quantized"),
    }
    if storage not in layouts[number]:
        raise ConfigError(
            f"{where}: {bits}-bit {number} weights are not stored as '{storage}'; expected one of "
            f"{', '.join(layouts[number])}"
        )
    if number == "fp4" and (strategy != "tensor_group" or size != NVFP4_GROUP):
        raise ConfigError(
            f"{where}: 4-bit floats are supported as NVFP4 only (strategy 'tensor_group', group_size 16), "
            f"found strategy '{strategy}', group_size {size}"
        )
    if number != "fp4" and strategy == "tensor_group":
        raise ConfigError(
            f"{where}: strategy 'tensor_group' belongs to 4-bit floats, found {bits}-bit {number}"
        )
    if number == "int" and strategy == "block":
        raise ConfigError(f"{where}: strategy 'block' belongs to 8-bit floats, found {bits}-bit {number}")
    if number == "int" and bits == 4 and storage != "pack-quantized":
        raise ConfigError(f"{where}: 4-bit whole numbers are stored as 'pack-quantized', found '{storage}'")
