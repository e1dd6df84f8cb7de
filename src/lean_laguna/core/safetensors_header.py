"""What a safetensors file says about itself: names, types, shapes and places of its tensors, no values.

Source: the safetensors format: eight bytes of header length, a JSON header, the tensors' bytes.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from lean_laguna.core.errors import CheckpointError
from lean_laguna.core.files import parse_json

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
        CheckpointError: The file is truncated, too long, or no safetensors file; names it and says which.
    """
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            raw = stream.read(length) if size >= 8 + length else b""
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from None
    if raw == b"" and _is_lfs_pointer(file, size):
        raise CheckpointError(
            f"{file}: only a Git LFS pointer, not the weights; run 'git lfs pull' in its folder"
        )
    if size < 8 or not raw:
        raise CheckpointError(
            f"{file}: truncated or not a safetensors file: {size} bytes, the header alone needs more"
        )
    header: Any = None
    with contextlib.suppress(ValueError):
        header = parse_json(raw)
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: not a safetensors file: its header is not a JSON object")
    header.pop("__metadata__", None)
    try:
        ends = [int(entry["data_offsets"][1]) for entry in header.values()]
        sound = all(
            isinstance(entry["shape"], list) and isinstance(entry["dtype"], str) for entry in header.values()
        )
    except (KeyError, TypeError, IndexError, ValueError):
        ends, sound = [], False
    if not sound:
        raise CheckpointError(f"{file}: not a safetensors file: its header lacks shapes, types or offsets")
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        state = "truncated" if size < expected else "longer than its header says"
        raise CheckpointError(f"{file}: {state}: found {size} bytes, expected {expected}")
    return header


def _is_lfs_pointer(file: Path, size: int) -> bool:
    return size < 1024 and file.read_bytes().startswith(_LFS_POINTER)
