"""Headers without the values, held against the safetensors package."""

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
