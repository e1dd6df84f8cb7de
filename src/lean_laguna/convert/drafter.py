"""A drafter from one format to another: the same bits under other names, or a refusal that says why not."""

from __future__ import annotations

import dataclasses
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lean_laguna.convert.folder import whole_folder
from lean_laguna.core.drafter_config import DFlashConfig
from lean_laguna.core.drafter_writing import write_config
from lean_laguna.core.errors import CheckpointError, ConfigError
from lean_laguna.core.model_config import LagunaConfig, config_path, read_config_json
from lean_laguna.models.dflash import DFlashDrafter
from lean_laguna.models.drafter_checkpoint import read_drafter, save_drafter
from lean_laguna.models.safetensors_reader import CheckpointReader

_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
_BORROWED = ("embed_tokens.weight", "verifier_lm_head.weight", "verifier_norm.weight")
_KEPT_FILES = ("README*", "LICENSE*", "LICENCE*", "NOTICE*")


@dataclass(frozen=True)
class DrafterConversion:
    """What a conversion did.

    Attributes:
        before: Format of the source.
        after: Format of the destination.
        num_weights: Weights, each found again with the same bits.
        left_out: Tensors of the source that are the target's own and are shared with it, not stored.
    """

    before: str
    after: str
    num_weights: int
    left_out: tuple[str, ...]


def convert_drafter(
    source: Path,
    destination: Path,
    format: str,
    *,
    target: LagunaConfig | None = None,
    target_name: str | None = None,
) -> DrafterConversion:
    """Write a drafter in another format, without changing a bit of it.

    Args:
        source: Drafter folder, in any of the formats.
        destination: A folder that does not exist yet, or an empty one.
        format: ``laguna``, ``z-lab``, ``speculators`` or ``deepspec``.
        target: The target it is for, to check that the two belong together; also fills in its number of
            layers, which z-lab's format needs and a speculators config does not say.
        target_name: The target's name, for the format that records it.

    Raises:
        CheckpointError: The source is damaged, quantised, or no drafter.
        ConfigError: The format cannot hold what this drafter computes; names what it lacks.
    """
    given, where = read_config_json(source), str(config_path(source))
    if given.get("quantization_config") is not None:
        raise CheckpointError(
            f"{where}: this drafter is quantised, and formats name quantised weights differently; convert "
            "the unquantised one and quantise the result (lean-laguna convert quantize)"
        )
    config = DFlashConfig.from_dict(given, where)
    if target is not None:
        config.check_target(target, where)
        config = dataclasses.replace(config, num_target_layers=target.num_hidden_layers)
    _check_config(config, format, target_name)
    reader = CheckpointReader(source)
    drafter = read_drafter(source, dtype=_dtype_of(reader, config))
    drafter.config = config
    with whole_folder(destination) as folder:
        provenance = given.get("provenance")
        save_drafter(
            drafter,
            folder,
            format=format,
            provenance=provenance if isinstance(provenance, dict) else None,
            target_name=target_name or _recorded_target(given),
        )
        _check_weights(drafter, folder)
        for pattern in _KEPT_FILES:
            for file in source.glob(pattern):
                if file.is_file():
                    shutil.copyfile(file, folder / file.name)
    return DrafterConversion(
        config.format,
        format,
        sum(parameter.numel() for parameter in drafter.parameters()),
        tuple(name for name in reader.names() if _is_borrowed(name, config)),
    )


def _check_config(config: DFlashConfig, format: str, target_name: str | None) -> None:
    """Refuse a format from which the config would not come back as it is."""
    written = write_config(config, format, target_name)
    if format == "z-lab" and config.num_target_layers is None:
        raise ConfigError(
            "the z-lab format states the target's number of layers, which this drafter's does not say; "
            "name the target with --target"
        )
    again = DFlashConfig.from_dict(written, f"{format} config")
    for field in dataclasses.fields(DFlashConfig):
        before, after = getattr(config, field.name), getattr(again, field.name)
        if field.name != "format" and before != after:
            raise ConfigError(
                f"this drafter ({config.format} format) cannot be written as {format}, which cannot hold "
                f"{field.name} = {before!r}; it would read as {after!r}"
            )


def _dtype_of(reader: CheckpointReader, config: DFlashConfig) -> torch.dtype:
    """Return the one number format of a drafter's weights."""
    names = [name for name in reader.names() if not _is_borrowed(name, config)]
    kinds = {reader.dtype_name(name) for name in names} & set(_DTYPES)
    if len(kinds) != 1:
        raise CheckpointError(
            f"{reader.path}: weights are stored as {', '.join(sorted(kinds)) or 'no known type'}; expected "
            "one number format for all"
        )
    return _DTYPES[kinds.pop()]


def _check_weights(drafter: DFlashDrafter, folder: Path) -> None:
    """Read a written drafter and compare every weight, bit by bit."""
    again = read_drafter(folder, dtype=drafter.norm.dtype)
    before, after = drafter.state_dict(), again.state_dict()
    for name, weight in before.items():
        found = after.get(name)
        if found is None or not torch.equal(
            weight.view(-1).view(torch.uint8), found.view(-1).view(torch.uint8)
        ):
            raise CheckpointError(
                f"{folder}: weight '{name}' did not come back as it was; nothing was written"
            )


def _is_borrowed(name: str, config: DFlashConfig) -> bool:
    return name.endswith(_BORROWED) or (name.endswith("lm_head.weight") and not config.has_own_lm_head)


def _recorded_target(given: dict[str, Any]) -> str | None:
    """Return the target that a speculators config names."""
    section = given.get("speculators_config")
    verifier = section.get("verifier") if isinstance(section, dict) else None
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    return name if isinstance(name, str) else None
