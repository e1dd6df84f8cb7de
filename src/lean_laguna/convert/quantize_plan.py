"""What to quantise and how: rules of the command line matched with a checkpoint's linears."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lean_laguna.convert.modules import CLASSES, GROUPS, class_of, plain_name
from lean_laguna.convert.source import FLOATS, Source
from lean_laguna.core.errors import ConfigError, nearest
from lean_laguna.models.quantised_reader import spellings
from lean_laguna.quant.config import compile_target
from lean_laguna.quant.scheme import FP8_BLOCK, FP8_CHANNEL, NVFP4, Activations, WeightScheme, packed_integer

DEFAULT_GROUP = 128
_USUAL_SIZES = (128, 64, 32, 16, 8)  # of groups
SCHEMES = ("nvfp4", "fp8-block", "fp8-channel", "int8", "int4")


@dataclass(frozen=True)
class Rule:
    """Modules and what becomes of them.

    Attributes:
        pattern: A word of ``GROUPS``, a module's name, or a regular expression after ``re:``.
        scheme: How to store them; None leaves them as they are.
    """

    pattern: str
    scheme: WeightScheme | None


def parse_scheme(word: str, group_size: int | None = None) -> WeightScheme:
    """Return the scheme of a word such as ``nvfp4`` or ``int4:32``; ``:32`` is the group size.

    Args:
        word: One of ``SCHEMES``, for integers with a group size or ``:row``.
        group_size: Of integers whose word names none; else 128 for int4 and a scale per row for int8.

    Raises:
        ConfigError: The word or its group size is unknown.
    """
    name, _, size = word.partition(":")
    fixed = {"nvfp4": NVFP4, "fp8-block": FP8_BLOCK, "fp8-channel": FP8_CHANNEL}
    if name in fixed:
        if size:
            raise ConfigError(f"scheme '{word}': {name} has no group size to choose; expected '{name}'")
        return fixed[name]
    if name not in SCHEMES:
        raise ConfigError(f"scheme '{word}' is unknown{nearest(name, SCHEMES)}")
    bits = int(name.removeprefix("int"))
    if size == "row":
        return packed_integer(bits, None)
    if size and (not size.isdigit() or int(size) < 1):
        raise ConfigError(f"scheme '{word}': the group size must be a whole number from 1 or 'row'")
    chosen = int(size) if size else group_size
    return packed_integer(bits, chosen if chosen or bits == 8 else DEFAULT_GROUP)


def group_rules(words: str, scheme: WeightScheme | None) -> list[Rule]:
    """Return a rule for each of ``experts+attention`` and such.

    Raises:
        ConfigError: A word is unknown.
    """
    rules = []
    for word in words.split("+"):
        if word not in GROUPS:
            raise ConfigError(f"modules '{word}' are unknown{nearest(word, GROUPS)}")
        rules.append(Rule(word, scheme))
    return rules


def make_plan(source: Source, rules: Sequence[Rule]) -> dict[str, WeightScheme]:
    """Return the linears to quantise with their schemes; the first rule that matches a linear counts.

    Raises:
        ConfigError: A rule matches no linear, or one that is quantised already, or a weight's shape or type
            does not fit its scheme; names the module.
    """
    schemes: dict[str, WeightScheme] = {}
    decided: set[str] = set()
    for rule in rules:
        matched = matching(rule.pattern, source)
        if not matched:
            raise ConfigError(_matches_nothing(rule.pattern, source))
        for module in matched:
            if module in decided:
                continue
            decided.add(module)
            if rule.scheme is not None:
                schemes[module] = rule.scheme
    if not schemes:
        raise ConfigError(
            f"{source.path}: the rules leave everything as it is; expected a scheme for some modules"
        )
    check_schemes(schemes, source)
    return schemes


def check_schemes(schemes: Mapping[str, WeightScheme], source: Source) -> None:
    """Refuse linears that are quantised already, and weights whose shape or type does not fit their scheme.

    Raises:
        ConfigError: Names the module.
    """
    for module, scheme in schemes.items():
        _check(module, scheme, source)
        try:
            scheme.tensors(*source.shapes[module])
        except ConfigError as error:
            hint = _fitting_words(scheme, schemes, source)
            raise ConfigError(f"{source.path}: '{module}': {error}{hint}") from None


def like_schemes(source: Source, model: Source) -> tuple[dict[str, WeightScheme], list[str]]:
    """Return the schemes under which another checkpoint stores the linears that this one has unquantised.

    Args:
        source: What will be quantised.
        model: The checkpoint to imitate.

    Returns:
        Schemes by module, and notes on classes whose scheme was not taken over as it is.

    Raises:
        ConfigError: The other checkpoint quantises nothing that this one has unquantised.
    """
    by_name = {plain_name(module): scheme for module, scheme in model.quantised.items()}
    schemes: dict[str, WeightScheme] = {}
    notes: set[str] = set()
    for module in source.shapes:
        scheme = by_name.get(plain_name(module))
        if scheme is None or module in source.quantised:
            continue
        if scheme.activations == "static":
            notes.add(f"{class_of(module)}: weights only, since activation scales need data")
        schemes[module] = as_written(scheme)
    if not schemes:
        raise ConfigError(
            f"{model.path}: quantises no linear that {source.path} holds unquantised; expected a quantised "
            "build of the same model"
        )
    check_schemes(schemes, source)
    return schemes, sorted(notes)


def scheme_of_class(model: Source, name: str) -> WeightScheme:
    """Return the scheme that a checkpoint has for a class of linears, as this package writes it.

    Raises:
        ConfigError: The class is unknown, is not quantised there, or has several schemes.
    """
    if name not in CLASSES:
        raise ConfigError(f"module class '{name}' is unknown{nearest(name, CLASSES)}")
    found = {as_written(scheme) for module, scheme in model.quantised.items() if class_of(module) == name}
    if len(found) != 1:
        said = ", ".join(sorted(scheme.name for scheme in found)) or "none"
        raise ConfigError(f"{model.path}: expected one scheme for its {name}, found {said}")
    return found.pop()


def as_written(scheme: WeightScheme) -> WeightScheme:
    """Return a scheme as it is written without data: no activation scales, compressed-tensors' names."""
    how: Activations = "none" if scheme.activations == "static" else scheme.activations
    return dataclasses.replace(scheme, activations=how, spelling="compressed-tensors")


def matching(pattern: str, source: Source) -> list[str]:
    """Return the linears that a rule's pattern means.

    Raises:
        ConfigError: It is not a regular expression.
    """
    if pattern in GROUPS:
        return [module for module in source.shapes if class_of(module) in GROUPS[pattern]]
    expression = compile_target(pattern, str(source.path))
    return [module for module in source.shapes if any(expression.match(name) for name in spellings(module))]


def _matches_nothing(pattern: str, source: Source) -> str:
    if pattern in GROUPS:
        present: Mapping[str, None] = dict.fromkeys(str(class_of(module)) for module in source.shapes)
        return f"{source.path}: has no linears of class '{pattern}'; it has: {', '.join(present)}"
    leaves = sorted({re.sub(r"\d+", "N", module) for module in source.shapes})
    hint = nearest(re.sub(r"\d+", "N", pattern), leaves)
    return f"{source.path}: the pattern '{pattern}' matches no linear (N stands for a number){hint}"


def _check(module: str, scheme: WeightScheme, source: Source) -> None:
    if module in source.quantised:
        raise ConfigError(
            f"{source.path}: '{module}' is stored as {source.quantised[module].name} already; expected rules "
            "that leave it out, or an unquantised checkpoint"
        )
    kind = source.tensors.dtype_name(f"{module}.weight")
    if kind not in FLOATS:
        raise ConfigError(f"{source.path}: '{module}' has type {kind}; expected {' or '.join(FLOATS)}")
    if scheme.strategy == "tensor" and scheme.number == "int":
        raise ConfigError(f"{source.path}: '{module}': {scheme.name} is read, not written")


def _fitting_words(scheme: WeightScheme, schemes: Mapping[str, WeightScheme], source: Source) -> str:
    """Say which schemes of integers fit all weights that one scheme was meant for; empty where none does."""
    columns = [source.shapes[module][1] for module, other in schemes.items() if other == scheme]
    sizes = [size for size in _USUAL_SIZES if all(count % size == 0 for count in columns)]
    if scheme.number != "int" or not sizes:
        return ""
    words = " or ".join(f"--scheme int{scheme.num_bits}:{size}" for size in sizes[:2])
    return f"; {words} fits all {len(columns):,} weights that were to be stored so"
