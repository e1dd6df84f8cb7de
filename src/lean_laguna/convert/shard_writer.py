"""A safetensors file written piece by piece, maybe by several processes; it appears whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from lean_laguna.core.errors import CheckpointError, ConfigError
from lean_laguna.quant.scheme import TensorSpec

_COPY_BYTES = 1 << 20
# safetensors aligns the tensors' bytes to this by blanks after the header.
_ALIGNMENT = 8
# What transformers and vLLM look for: whose tensors these are.
_METADATA = {"format": "pt"}
# Bits of infinity; those of what is not finite are no less, the sign aside.
_INFINITIES = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000}


class ShardWriter:
    """Writes the tensors of one file at their places; ``finish`` gives the file its name."""

    def __init__(self, path: Path, specs: Mapping[str, TensorSpec], *, is_joined: bool = False):
        """Lay out a file, or open one that another writer has laid out.

        Args:
            path: The finished file; until then it lies beside it.
            specs: All its tensors, in order.
            is_joined: Write into another's unfinished file, maybe another process's, who will finish it.

        Raises:
            ConfigError: The folder cannot be written to.
        """
        self.path, self._partial = path, path.with_name(f".{path.name}.partial")
        header: dict[str, object] = {"__metadata__": _METADATA}
        at, self._specs = 0, dict(specs)
        places: dict[str, int] = {}
        for name, spec in specs.items():
            places[name] = at
            header[name] = {
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "data_offsets": [at, at + spec.num_bytes],
            }
            at += spec.num_bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        start = 8 + len(text)
        self._places = {name: start + place for name, place in places.items()}
        self.num_bytes = start + at
        try:
            if is_joined:
                self._handle = os.open(self._partial, os.O_WRONLY)
                return
            self._handle = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
            os.pwrite(self._handle, len(text).to_bytes(8, "little") + text, 0)
            os.ftruncate(self._handle, self.num_bytes)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None

    def write(self, name: str, tensor: Tensor, first_row: int = 0) -> None:
        """Write a tensor, or rows of one from ``first_row`` on.

        Raises:
            ConfigError: The disk is full or fails.
        """
        spec = self._specs[name]
        rows = spec.shape[0] if spec.shape else 1
        place = self._places[name] + first_row * (spec.num_bytes // max(rows, 1))
        self._put(tensor.contiguous().view(-1).view(torch.uint8).numpy().data, place)

    def copy(self, name: str, file: Path, first: int) -> None:
        """Copy a tensor's bytes as they are from another file.

        Raises:
            CheckpointError: The file cannot be read, or a value is not finite.
            ConfigError: The disk is full or fails.
        """
        left, place = self._specs[name].num_bytes, self._places[name]
        infinity, where = _INFINITIES.get(self._specs[name].dtype), f"{file}: tensor '{name}'"
        try:
            buffer = memoryview(bytearray(min(left, _COPY_BYTES)))
            with file.open("rb") as stream:
                stream.seek(first)
                while left:
                    data = buffer[: min(left, _COPY_BYTES)]
                    # Never less but at the end: the stream is buffered.
                    if stream.readinto(data) < len(data):
                        raise CheckpointError(f"{where}: the file ended early")
                    if infinity is not None and _largest_bits(data, infinity) >= infinity:
                        raise CheckpointError(f"{where}: not all values are finite; expected all")
                    self._put(data, place)
                    left, place = left - len(data), place + len(data)
        except OSError as error:
            raise CheckpointError(f"{where}: cannot be read: {error.strerror}") from None

    def finish(self) -> None:
        """Flush the file to disk and give it its name."""
        os.fsync(self._handle)
        os.close(self._handle)
        os.replace(self._partial, self.path)

    def close(self) -> None:
        """Close a file that another writer finishes."""
        os.close(self._handle)

    def discard(self) -> None:
        """Remove the unfinished file."""
        with contextlib.suppress(OSError):
            os.close(self._handle)
        with contextlib.suppress(OSError):
            os.unlink(self._partial)

    def _put(self, data: memoryview, place: int) -> None:
        try:
            while data:
                written = os.pwrite(self._handle, data, place)
                data, place = data[written:], place + written
        except OSError as error:
            raise ConfigError(f"cannot write {self.path}: {error.strerror or error}") from None


def _largest_bits(data: memoryview, infinity: int) -> int:
    """Return the bits of the largest magnitude, of floats as wide as those with this infinity."""
    kind = torch.int16 if infinity < 1 << 16 else torch.int32
    return int(torch.frombuffer(data, dtype=kind).bitwise_and(torch.iinfo(kind).max).amax())
