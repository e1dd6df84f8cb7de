"""What a safetensors file says about itself: names, types, shapes and places of its tensors, no values.

Source: the safetensors format: eight bytes of header length, a JSON header, the tensors' bytes.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

from lean_laguna.core.errors import CheckpointError
from lean_laguna.core.files import RepeatedNameError, parse_json

DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16,
    "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64, "F4": 4,
}  # fmt: skip
"""Bits of one element, by the format's name of the type."""
_LFS_POINTER = b"version https://git-lfs"


def read_header(file: Path) -> dict[str, dict[str, Any]]:
    """Parse and check a safetensors header against the file's length.

    Returns:
        Per tensor its entry: ``dtype``, ``shape`` and ``data_offsets``; the metadata is left out.

    Raises:
        CheckpointError: The file is truncated, too long, or no safetensors file, or what it says of a tensor
            cannot be; names file and tensor.
    """
    try:
        if file.exists() and not file.is_file():
            raise CheckpointError(f"{file}: not a file but a folder, a pipe or a device")
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            raw = stream.read(length) if size >= 8 + length else b""
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror or error}") from None
    if raw == b"" and _is_lfs_pointer(file, size):
        raise CheckpointError(
            f"{file}: only a Git LFS pointer, not the weights; run 'git lfs pull' in its folder"
        )
    if size < 8 or not raw:
        raise CheckpointError(
            f"{file}: truncated or not a safetensors file: {size} bytes, the header alone needs more"
        )
    header = _parse(file, raw)
    header.pop("__metadata__", None)
    for name, entry in header.items():
        _check_entry(f"{file}: tensor '{name}'", entry)
    expected = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if size != expected:
        state = "truncated" if size < expected else "longer than its header says"
        raise CheckpointError(f"{file}: {state}: found {size} bytes, expected {expected}")
    _check_places(file, header)
    return header


def _parse(file: Path, raw: bytes) -> dict[str, Any]:
    header: Any = None
    try:
        header = parse_json(raw)
    except RepeatedNameError as error:
        raise CheckpointError(f"{file}: its header: {error}") from None
    except ValueError:
        pass  # as what is no object
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: not a safetensors file: its header is not a JSON object")
    return header


def _check_entry(where: str, entry: Any) -> None:
    """Refuse an entry of the header that has not the form it must have."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise CheckpointError(f"{where}: the header lacks its shape, type or offsets")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in DTYPE_BITS:
        raise CheckpointError(f"{where} has the unknown type {kind!r}; known: {', '.join(DTYPE_BITS)}")
    if not _are_sizes(shape):
        raise CheckpointError(f"{where} has shape {shape!r}; expected whole numbers from 0")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where} has data_offsets {offsets!r}; expected whole numbers, first and end")


def _check_places(file: Path, header: dict[str, dict[str, Any]]) -> None:
    """Refuse tensors that overlap, leave gaps, or take other bytes than their shape and type need."""
    at = 0
    for name, entry in sorted(header.items(), key=lambda item: tuple(item[1]["data_offsets"])):
        first, end = entry["data_offsets"]
        num_bits = prod(entry["shape"]) * DTYPE_BITS[entry["dtype"]]
        if first != at or (end - first) * 8 != num_bits:
            kind, expected = f"{entry['dtype']} of shape {entry['shape']}", f"{at} to {at + num_bits // 8}"
            raise CheckpointError(
                f"{file}: tensor '{name}', {kind}, does not fit its place in the file: "
                f"bytes {first} to {end}, expected {expected}"
            )
        at = end


def _are_sizes(given: Any) -> bool:
    return isinstance(given, list) and all(type(number) is int and number >= 0 for number in given)


def _is_lfs_pointer(file: Path, size: int) -> bool:
    return size < 1024 and file.read_bytes().startswith(_LFS_POINTER)
