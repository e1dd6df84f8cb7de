"""Headers without the values, held against the safetensors package."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from lean_laguna.core.errors import CheckpointError
from lean_laguna.core.safetensors_header import DTYPE_BITS, read_header


def test_it_reads_what_the_package_wrote(tmp_path):
    kinds = [
        torch.bfloat16,
        torch.float32,
        torch.uint8,
        torch.int32,
        torch.int64,
        torch.float8_e4m3fn,
        torch.bool,
    ]
    tensors = {str(kind): torch.zeros(3, 5, dtype=kind) for kind in kinds}
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "a.safetensors")
    assert header.keys() == tensors.keys()
    for name, tensor in tensors.items():
        start, end = header[name]["data_offsets"]
        assert header[name]["shape"] == [3, 5]
        assert end - start == tensor.nbytes == 15 * DTYPE_BITS[header[name]["dtype"]] // 8


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "truncated"),
        (b"12345678" * 40, "truncated"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "Git LFS pointer"),
        (b"\x02\0\0\0\0\0\0\0[]", "not a JSON object"),
        (b"\x02\0\0\0\0\0\0\0{}and more", "longer than its header says"),
    ],
)
def test_what_is_no_whole_file_is_refused_by_name(content, said, tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: .*{said}"):
        read_header(file)


def entry(kind="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": kind, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ({"a": 3}, "lacks its shape, type or offsets"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "lacks its shape, type or offsets"),
        ({"a": entry("bfloat16")}, "has the unknown type 'bfloat16'; known: BOOL"),
        ({"a": entry(shape=(-2,))}, r"has shape \[-2\]; expected whole numbers from 0"),
        ({"a": entry(shape=("2",))}, r"has shape \['2'\]"),
        ({"a": entry(shape=(True,))}, r"has shape \[True\]"),
        ({"a": entry(offsets=(8, 0))}, r"has data_offsets \[8, 0\]; expected whole"),
        ({"a": entry(offsets=(0.0, 8))}, r"has data_offsets \[0.0, 8\]"),
        ({"a": entry(offsets=("0", "8"))}, "has data_offsets"),
        ({"a": entry(offsets=(8,))}, "has data_offsets"),
        (
            {"a": entry(shape=(3,))},
            r"F32 of shape \[3\], does not fit its place .*: bytes 0 to 8, expected 0 to 12",
        ),
        ({"a": entry(), "b": entry(offsets=(4, 12))}, "b', .* bytes 4 to 12, expected 8 to 16"),
        ({"a": entry(), "b": entry(offsets=(16, 24))}, "b', .* bytes 16 to 24, expected 8 to 16"),
        ({"a": entry(), "b": entry()}, "b', .* bytes 0 to 8, expected 8 to 16"),
    ],
)
def test_an_entry_that_cannot_be_is_named(header, said, tmp_path):
    file = tmp_path / "model.safetensors"
    raw = json.dumps(header).encode()
    ends = [given["data_offsets"] for given in header.values() if isinstance(given, dict) and len(given) == 3]
    size = max((max(map(int, offsets)) for offsets in ends), default=0)
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(size))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor '.*{said}"):
        read_header(file)


def test_a_name_that_stands_twice_in_a_header_is_named(tmp_path):
    file = tmp_path / "model.safetensors"
    once = json.dumps({"a": entry()})[1:-1]
    raw = f"{{{once}, {once}}}".encode()
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(8))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: its header: 'a' stands twice"):
        read_header(file)


def test_empty_tensors_and_scalars_fit(tmp_path):
    save_file(
        {"a": torch.zeros(0, 3), "b": torch.tensor(2.0), "c": torch.ones(2)}, tmp_path / "a.safetensors"
    )
    assert read_header(tmp_path / "a.safetensors").keys() == {"a", "b", "c"}


def test_what_is_no_file_is_not_opened(tmp_path):
    (tmp_path / "folder.safetensors").mkdir()
    os.mkfifo(tmp_path / "pipe.safetensors")  # opening it would wait for a writer
    (tmp_path / "device.safetensors").symlink_to("/dev/zero")  # reading it would never end
    for kind in ("folder", "pipe", "device"):
        with pytest.raises(CheckpointError, match=rf"{kind}\.safetensors: not a file but a folder, a pipe"):
            read_header(tmp_path / f"{kind}.safetensors")
