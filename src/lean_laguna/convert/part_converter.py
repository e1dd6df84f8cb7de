"""Converts a few tensors at a time into files that are laid out already, in this process or in another."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lean_laguna.convert.shard_layout import WEIGHT, is_encoded, shard_layout
from lean_laguna.convert.shard_writer import ShardWriter
from lean_laguna.convert.source import Source
from lean_laguna.convert.weight_encoder import WeightEncoder, WeightError
from lean_laguna.quant.scheme import WeightScheme


@dataclass(frozen=True)
class Part:
    """Tensors of one file that a worker converts at a time.

    Attributes:
        file: The source's file.
        names: Their names.
        num_bytes: Their bytes there.
    """

    file: Path
    names: tuple[str, ...]
    num_bytes: int


@dataclass(frozen=True)
class Conversion:
    """All that a worker has to know.

    Attributes:
        source: The checkpoint.
        schemes: Of the linears to quantise.
        folder: Where the new files lie.
        shares_divisors: As ``WeightEncoder``.
        device: As ``WeightEncoder``.
        is_checked: Decode every weight again and keep its error.
    """

    source: Source
    schemes: Mapping[str, WeightScheme]
    folder: Path
    shares_divisors: bool = True
    device: str = "cpu"
    is_checked: bool = False

    def portable(self) -> Conversion:
        """Return it as another process is sent it: without the logical tensors, which it does not need."""
        source = dataclasses.replace(self.source, reader=self.source.tensors)
        return dataclasses.replace(self, source=source)

    def start(self) -> PartConverter:
        """Return a worker for it."""
        return PartConverter(self)


class PartConverter:
    """Converts parts of one file after another; may be called from several threads."""

    def __init__(self, conversion: Conversion):
        """Prepare; files are opened when they are needed."""
        self._conversion = conversion
        self._encoder = WeightEncoder(
            conversion.source,
            conversion.schemes,
            shares_divisors=conversion.shares_divisors,
            device=conversion.device,
        )
        self._names = conversion.source.names_by_file()
        self._lock = threading.Lock()
        self._file: Path | None = None
        self._writer: ShardWriter | None = None

    def run(self, part: Part) -> dict[str, WeightError]:
        """Convert a part into the new file of the same name; all parts of one file come before another's.

        Returns:
            Errors of its linears, where asked for.

        Raises:
            CheckpointError: A weight or file is damaged.
            ConfigError: The disk is full or fails.
        """
        given = self._conversion
        writer = self._writer_of(part.file)
        errors: dict[str, WeightError] = {}
        for name in part.names:
            if not is_encoded(name, given.schemes):
                writer.copy(name, part.file, given.source.tensors.bytes_of(name)[1])
                continue
            module = name.removesuffix(WEIGHT)
            error = self._encoder.write(module, writer, is_checked=given.is_checked)
            if given.is_checked:
                errors[module] = error
        return errors

    def close(self) -> None:
        """Close the last file."""
        if self._writer is not None:
            self._writer.close()
        self._file = self._writer = None

    def _writer_of(self, file: Path) -> ShardWriter:
        with self._lock:
            if self._writer is None or file != self._file:
                self.close()
                given = self._conversion
                specs = shard_layout(given.source, self._names[file], given.schemes)
                self._writer = ShardWriter(given.folder / file.name, specs, is_joined=True)
                self._file = file
            return self._writer
