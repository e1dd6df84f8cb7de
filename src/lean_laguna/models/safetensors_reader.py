"""Read tensors of a checkpoint folder: one file or many, memory-mapped, checked before use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from lean_laguna.core.errors import CheckpointError
from lean_laguna.core.files import is_there, parse_json
from lean_laguna.core.safetensors_header import read_header

_INDEX = "model.safetensors.index.json"


class CheckpointReader:
    """Tensors of a checkpoint by name; opens files on demand and maps them into memory.

    Every file is checked at construction: it is there, its header is sound and its length is what the header
    says.
    """

    def __init__(self, path: str | Path):
        """Open a folder, or one ``.safetensors`` file.

        Raises:
            CheckpointError: A file is missing, truncated or damaged; names it.
        """
        self.path = Path(path)
        self._file_of: dict[str, Path] = {}
        self._headers: dict[str, dict[str, Any]] = {}
        self._open: dict[Path, Any] = {}
        self._starts: dict[Path, int] = {}
        promised = self._promised_files()
        for file in sorted(set(promised.values())) if promised else self._loose_files():
            for name, entry in read_header(file).items():
                if name in self._file_of:
                    raise CheckpointError(f"{file}: tensor '{name}' is also in {self._file_of[name].name}")
                self._file_of[name], self._headers[name] = file, entry
        for name, file in promised.items():
            if self._file_of.get(name) != file:
                raise CheckpointError(
                    f"{file}: tensor '{name}' is missing, though {_INDEX} says that it is there"
                )

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process is sent: it opens files of its own."""
        return {**self.__dict__, "_open": {}}

    def names(self) -> list[str]:
        """Names of all tensors, sorted."""
        return sorted(self._file_of)

    def file_of(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        return self._file_of[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the header."""
        return tuple(self._headers[name]["shape"])

    def dtype_name(self, name: str) -> str:
        """Number format of a tensor as safetensors spells it, such as ``BF16``."""
        return str(self._headers[name]["dtype"])

    def get(self, name: str) -> torch.Tensor:
        """Return a tensor as stored, on the CPU, mapped and not copied where the format allows.

        Raises:
            CheckpointError: The tensor cannot be read.
        """
        file = self._file_of[name]
        try:
            if file not in self._open:
                self._open[file] = safe_open(str(file), framework="pt", device="cpu")
            tensor: torch.Tensor = self._open[file].get_tensor(name)
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{file}: tensor '{name}' cannot be read: {error}") from None
        return tensor

    def copy_to(self, name: str, target: torch.Tensor) -> None:
        """Copy a tensor into ``target``, converting it to the dtype and device there.

        Raises:
            CheckpointError: The tensor cannot be read.
        """
        target.copy_(self.get(name))

    def bytes_of(self, name: str) -> tuple[Path, int, int]:
        """Return where a tensor's bytes lie: the file, the place of the first in it, and how many."""
        file = self._file_of[name]
        if file not in self._starts:
            with file.open("rb") as stream:
                self._starts[file] = 8 + int.from_bytes(stream.read(8), "little")
        first, end = self._headers[name]["data_offsets"]
        return file, self._starts[file] + first, end - first

    def close(self) -> None:
        """Release the mapped files."""
        self._open.clear()

    def _promised_files(self) -> dict[str, Path]:
        if self.path.is_file():
            return {}
        if not self.path.is_dir():
            raise CheckpointError(
                f"{self.path}: not found; expected a checkpoint folder or a .safetensors file"
            )
        index = self.path / _INDEX
        if not is_there(index):
            return {}
        try:
            given = parse_json(index.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{index}: cannot be read as JSON: {error}") from None
        weight_map = given.get("weight_map") if isinstance(given, Mapping) else None
        if not isinstance(weight_map, Mapping) or not all(isinstance(f, str) for f in weight_map.values()):
            raise CheckpointError(f"{index}: 'weight_map' must be an object from tensor names to file names")
        promised = {name: self.path / file for name, file in weight_map.items()}
        for file in sorted(set(promised.values())):
            if file.parent != self.path:
                raise CheckpointError(f"{index}: names the file {file}; expected files of its own folder")
            if not file.exists():
                count = sum(owner == file for owner in promised.values())
                raise CheckpointError(f"{file}: shard not found; {_INDEX} says that it holds {count} tensors")
        return promised

    def _loose_files(self) -> list[Path]:
        if self.path.is_file():
            return [self.path]
        single = self.path / "model.safetensors"
        files = [single] if single.exists() else sorted(self.path.glob("*.safetensors"))
        if not files:
            others = sorted(
                file.name for file in self.path.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".gguf")
            )
            found = f"found {', '.join(others)}" if others else "found none"
            raise CheckpointError(f"{self.path}: no *.safetensors file; only safetensors are read; {found}")
        return files
