"""Reads ``quantization_config``: which modules of a checkpoint are quantised, and how.

compressed-tensors' form in all its spellings, and the two others met in the wild: ``fp8`` (block scales
named ``weight_scale_inv``) and NVIDIA ModelOpt. How one weight is stored: ``scheme``. Whether a checkpoint's
tensors agree with its config is the loader's business.

Source: compressed-tensors 0.20, quantization/quant_config.py, quant_args.py, quant_scheme.py; vLLM 0.33,
compressed_tensors/utils.py (order of matching).
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from lean_laguna.core.errors import ConfigError, reject_unknown
from lean_laguna.quant.arguments import kv_scheme, weight_scheme
from lean_laguna.quant.presets import preset
from lean_laguna.quant.scheme import FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, NVFP4, Activations, WeightScheme

_REGEX = "re:"
_METHODS = ("compressed-tensors", "compressed_tensors", "sparseml")
_OTHER_METHODS = ("fp8", "modelopt", "modelopt_fp4")
_KEYS = frozenset(
    """
    quant_method format config_groups ignore kv_cache_scheme quantization_status global_compression_ratio
    version sparsity_config transform_config moe_sparsity_config run_compressed dequantize quantization_config
    """.split()
)
_GROUP_KEYS = ("targets", "weights", "input_activations", "output_activations", "format")
# Layouts that stand in ``format`` and say nothing of one weight.
_MIXED = (None, "mixed-precision")
# transformers' name of the shared expert and poolside's; configs use either.
_SPELLINGS = ((".shared_expert.", ".shared_experts."), (".shared_experts.", ".shared_expert."))


@dataclass(frozen=True)
class QuantizationGroup:
    """Modules with one scheme: names, regular expressions after ``re:``, or a class such as ``Linear``."""

    name: str
    targets: tuple[str, ...]
    scheme: WeightScheme


@dataclass(frozen=True)
class QuantizationConfig:
    """Which modules of a checkpoint are quantised, and how.

    Attributes:
        groups: In the config's order; the first match counts.
        ignore: Targets that stay unquantised, whatever the groups say.
        has_fp8_kv: Whether the checkpoint means keys and values to be kept in FP8.
        where: What to name in errors.
    """

    groups: tuple[QuantizationGroup, ...]
    ignore: tuple[str, ...]
    has_fp8_kv: bool
    where: str

    def scheme_of(self, *names: str, kind: str = "Linear") -> WeightScheme | None:
        """Return how a module is stored, None for one that is not quantised.

        Args:
            *names: The module's name, such as ``model.layers.3.self_attn.q_proj``, in every spelling.
            kind: Its class in Hugging Face's model.
        """
        names = (*names, *(name.replace(*pair) for name in names for pair in _SPELLINGS if pair[0] in name))
        if self._ignored.matches(names, kind):
            return None
        for matcher in self._matchers:
            if matcher.matches_name(names):
                return matcher.scheme
        for matcher in self._matchers:
            if kind in matcher.exact:
                return matcher.scheme
        return None

    @cached_property
    def _ignored(self) -> _Matcher:
        return _Matcher(self.ignore, f"{self.where}: ignore")

    @cached_property
    def _matchers(self) -> list[_Matcher]:
        return [_Matcher(group.targets, f"{self.where}: {group.name}", group.scheme) for group in self.groups]


class _Matcher:
    """A list of targets, split into a set of names and compiled expressions: lists run to thousands."""

    def __init__(self, targets: Iterable[str], where: str, scheme: WeightScheme | None = None):
        self.scheme = scheme
        self.exact = {target for target in targets if not target.startswith(_REGEX)}
        self._expressions = [compile_target(target, where) for target in targets if target.startswith(_REGEX)]

    def matches_name(self, names: Sequence[str]) -> bool:
        return any(name in self.exact for name in names) or any(
            expression.match(name) for expression in self._expressions for name in names
        )

    def matches(self, names: Sequence[str], kind: str) -> bool:
        return kind in self.exact or self.matches_name(names)


def compile_target(target: str, where: str) -> re.Pattern[str]:
    """Return the expression of a ``re:`` target, or one that matches a plain name alone.

    Raises:
        ConfigError: It is not a regular expression.
    """
    try:
        return re.compile(
            target.removeprefix(_REGEX) if target.startswith(_REGEX) else re.escape(target) + "$"
        )
    except re.error as error:
        raise ConfigError(f"{where}: '{target}' is not a regular expression: {error}") from None


def read_quantization(config: Mapping[str, Any], where: str) -> QuantizationConfig | None:
    """Read the quantisation of a checkpoint's ``config.json``.

    Args:
        config: The whole parsed file.
        where: Its path, for errors.

    Returns:
        What is quantised, or None for an unquantised checkpoint.

    Raises:
        ConfigError: It is of a kind that is not supported, or a key or value is wrong; names key, value found
            and what would be right.
    """
    if config.get("quantization") is not None and config.get("quantization_config") is None:
        found = config["quantization"]
        mode = found.get("mode") if isinstance(found, Mapping) else found
        raise ConfigError(
            f"{where}: 'quantization' ({mode}) is MLX's layout, which is not supported; expected a "
            "checkpoint in compressed-tensors form, such as the -NVFP4 repository instead of -NVFP4-mlx"
        )
    for key in ("quantization_config", "compression_config"):
        if config.get(key) is not None:
            return _parse(config[key], f"{where}: {key}")
    return None


def _parse(given: Any, where: str) -> QuantizationConfig | None:
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} must be a JSON object, found {given!r}")
    nested = given.get("quantization_config")
    if isinstance(nested, Mapping) and "config_groups" not in given:
        return _parse({"quant_method": given.get("quant_method", _METHODS[0]), **nested}, where)
    method = given.get("quant_method", _METHODS[0] if "config_groups" in given else None)
    if method in _METHODS:
        return _compressed_tensors(given, where)
    if method == "fp8":
        return _plain_fp8(given, where)
    if method in _OTHER_METHODS:
        return _modelopt(given, where)
    raise ConfigError(
        f"{where}: quant_method {method!r} is not supported; expected 'compressed-tensors', 'fp8' or "
        "'modelopt'"
    )


def _compressed_tensors(given: Mapping[str, Any], where: str) -> QuantizationConfig | None:
    unknown = sorted(set(given) - _KEYS)
    if unknown:
        warnings.warn(f"{where}: keys without meaning here are ignored: {', '.join(unknown)}", stacklevel=5)
    for key in ("sparsity_config", "transform_config", "moe_sparsity_config"):
        section = given.get(key)
        if section and not (isinstance(section, Mapping) and section.get("format") in ("dense",)):
            raise ConfigError(f"{where}: '{key}' is not supported; expected none, found {section!r}")
    groups = given.get("config_groups")
    if not isinstance(groups, Mapping):
        raise ConfigError(f"{where}: 'config_groups' must be a JSON object of groups, found {groups!r}")
    parsed = tuple(
        _group(name, group, given.get("format"), f"{where}: config_groups: {name}")
        for name, group in groups.items()
    )
    has_fp8_kv = kv_scheme(given.get("kv_cache_scheme"), f"{where}: kv_cache_scheme")
    if not parsed and not has_fp8_kv:
        return None
    return QuantizationConfig(parsed, _names(given.get("ignore"), f"{where}: 'ignore'"), has_fp8_kv, where)


def _group(name: str, given: Any, model_format: Any, where: str) -> QuantizationGroup:
    if isinstance(given, list):  # a preset's name with its targets
        return QuantizationGroup(name, _names(given, where), preset(name, where))
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where} must be a JSON object, found {given!r}")
    reject_unknown(given, _GROUP_KEYS, where)
    if given.get("output_activations") is not None:
        raise ConfigError(f"{where}: 'output_activations' is not supported; expected null")
    targets = _names(given.get("targets"), f"{where}: 'targets'")
    if not targets:
        raise ConfigError(f"{where}: 'targets' is missing; expected a list such as ['Linear']")
    own = given.get("format")
    storage = own if own not in _MIXED else model_format if model_format not in _MIXED else None
    scheme = weight_scheme(given.get("weights"), given.get("input_activations"), storage, where)
    return QuantizationGroup(name, targets, scheme)


def _names(given: Any, where: str) -> tuple[str, ...]:
    if given is None:
        return ()
    if not isinstance(given, list) or not all(isinstance(name, str) and name for name in given):
        raise ConfigError(
            f"{where} must be a list of module names, classes or 're:' expressions, found {given!r}"
        )
    return tuple(given)


def _plain_fp8(given: Mapping[str, Any], where: str) -> QuantizationConfig:
    """FP8 as DeepSeek's and transformers' exports spell it."""
    block = given.get("weight_block_size")
    is_block = (
        isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    )
    if block is not None and not is_block:
        raise ConfigError(f"{where}: 'weight_block_size' must be two whole numbers, found {block!r}")
    scheme = FP8_TENSOR
    if block is not None:
        scheme = dataclasses.replace(FP8_BLOCK, block=(block[0], block[1]), spelling="fp8")
    how = given.get("activation_scheme", "dynamic")
    if how not in ("dynamic", "static"):
        raise ConfigError(f"{where}: 'activation_scheme' must be 'dynamic' or 'static', found {how!r}")
    scheme = dataclasses.replace(scheme, activations=how)
    ignored = given.get("ignored_layers") or given.get("modules_to_not_convert")
    # Each entry stands for a module and for everything below it.
    names = [
        f"{_REGEX}(.*\\.)?{re.escape(name)}(\\..*)?$"
        for name in _names(ignored, f"{where}: 'ignored_layers'")
    ]
    return QuantizationConfig(
        (QuantizationGroup("fp8", ("Linear",), scheme),), (*names, "lm_head"), False, where
    )


def _modelopt(given: Mapping[str, Any], where: str) -> QuantizationConfig:
    """NVIDIA ModelOpt's form: one algorithm, and globs of what it leaves out."""
    inner = given.get("quantization")
    values: Mapping[str, Any] = inner if isinstance(inner, Mapping) else given
    algorithm = values.get("quant_algo")
    schemes = {"NVFP4": NVFP4, "FP8": FP8_TENSOR, "FP8_PER_CHANNEL_PER_TOKEN": FP8_CHANNEL}
    if not isinstance(algorithm, str) or algorithm not in schemes:
        raise ConfigError(f"{where}: 'quant_algo' must be one of {', '.join(schemes)}, found {algorithm!r}")
    is_dynamic = algorithm == "FP8_PER_CHANNEL_PER_TOKEN"
    how: Activations = "dynamic" if is_dynamic else "static"
    scheme = dataclasses.replace(schemes[algorithm], activations=how, spelling="modelopt")
    ignored = values.get("exclude_modules") or values.get("ignore")
    names = [_REGEX + fnmatch.translate(name) for name in _names(ignored, f"{where}: 'exclude_modules'")]
    # Older exports name the cache's algorithm, newer ones have compressed-tensors' section. Other caches than
    # FP8's are no reason to refuse the weights: keys and values may be kept unquantised.
    cache = values.get("kv_cache_scheme")
    is_fp8 = isinstance(cache, Mapping) and (cache.get("num_bits"), cache.get("type")) == (8, "float")
    has_fp8_kv = is_fp8 or str(values.get("kv_cache_quant_algo") or "").upper() == "FP8"
    return QuantizationConfig(
        (QuantizationGroup(str(algorithm), ("Linear",), scheme),), tuple(names), has_fp8_kv, where
    )
