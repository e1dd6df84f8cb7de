"""A checkpoint to convert: its config, its tensors as they lie in the files, and its linears."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lean_laguna.convert.modules import class_of
from lean_laguna.core.drafter_config import is_drafter_config
from lean_laguna.core.errors import CheckpointError
from lean_laguna.core.model_config import config_path, read_config_json
from lean_laguna.models.checkpoint import check_laguna
from lean_laguna.models.drafter_checkpoint import check_drafter
from lean_laguna.models.quantised_reader import QuantisedReader, open_checkpoint
from lean_laguna.models.safetensors_reader import CheckpointReader
from lean_laguna.quant.scheme import WeightScheme

_WEIGHT = ".weight"
FLOATS = ("BF16", "F16", "F32")


@dataclass(frozen=True)
class Source:
    """A checkpoint folder, checked as far as headers tell.

    Attributes:
        path: The folder.
        config: Its parsed ``config.json``.
        tensors: Every tensor as it lies in the files.
        shapes: [N, K] of each linear, quantised or not, by module.
        quantised: How the linears are stored that are quantised already.
        reader: Logical tensors; quantised ones decoded.
    """

    path: Path
    config: Mapping[str, Any]
    tensors: CheckpointReader
    shapes: Mapping[str, tuple[int, int]]
    quantised: Mapping[str, WeightScheme]
    reader: CheckpointReader

    @property
    def is_drafter(self) -> bool:
        """Whether this is a drafter, which has an embedding of no target's layers."""
        return is_drafter_config(self.config)

    def other_modules(self) -> list[str]:
        """Modules with a weight that are no linears: norms, router, embeddings."""
        weights = [name.removesuffix(_WEIGHT) for name in self.tensors.names() if name.endswith(_WEIGHT)]
        return [module for module in weights if module not in self.shapes]

    def files(self) -> list[Path]:
        """Files with tensors, in order."""
        return list(self.names_by_file())

    def names_by_file(self) -> dict[Path, list[str]]:
        """Tensors of each file in the order of their bytes; files in order."""
        found: dict[Path, list[tuple[int, str]]] = {}
        for name in self.tensors.names():
            file, place, _ = self.tensors.bytes_of(name)
            found.setdefault(file, []).append((place, name))
        return {file: [name for _, name in sorted(found[file])] for file in sorted(found)}


def open_source(path: str | Path) -> Source:
    """Open a checkpoint to convert.

    Raises:
        CheckpointError: It is not there, half downloaded or damaged, or config and tensors disagree.
        ConfigError: It is quantised in a way that is not supported.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: not found; expected a checkpoint folder")
    unfinished = sorted(folder.rglob("*.incomplete"))
    if unfinished:
        raise CheckpointError(
            f"{folder}: half downloaded: {len(unfinished)} unfinished files such as {unfinished[0].name}; "
            "finish the download first"
        )
    config = read_config_json(folder)
    # Its result would be refused otherwise, hours later.
    (check_drafter if is_drafter_config(config) else check_laguna)(folder)
    reader = open_checkpoint(folder, config, str(config_path(folder)))
    shapes: dict[str, tuple[int, int]] = {}
    quantised: dict[str, WeightScheme] = {}
    for name in reader.names():
        module, shape = name.removesuffix(_WEIGHT), reader.shape(name)
        if not name.endswith(_WEIGHT) or class_of(module) is None or len(shape) != 2:
            continue
        shapes[module] = (shape[0], shape[1])
        scheme = reader.scheme_of(name) if isinstance(reader, QuantisedReader) else None
        if scheme is not None:
            quantised[module] = scheme
    return Source(folder, config, CheckpointReader(folder), shapes, quantised, reader)
