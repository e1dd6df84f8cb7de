"""Files written piece by piece."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lean_laguna.convert.shard_writer import ShardWriter
from lean_laguna.core.errors import CheckpointError, ConfigError
from lean_laguna.quant.scheme import TensorSpec


def test_pieces_in_any_order_make_the_file(tmp_path: Path) -> None:
    weight = torch.randn(10, 4).bfloat16()
    codes = torch.randn(6, 2).to(torch.float8_e4m3fn)
    save_file({"w": weight, "x": torch.ones(3)}, str(tmp_path / "old.safetensors"))
    specs = {
        "w": TensorSpec((10, 4), "BF16"),
        "codes": TensorSpec((6, 2), "F8_E4M3"),
        "shape": TensorSpec((2,), "I64"),
        "scale": TensorSpec((1,), "F32"),
    }
    writer = ShardWriter(tmp_path / "new.safetensors", specs)
    writer.write("w", weight[7:], 7)
    writer.write("w", weight[:7])
    writer.write("scale", torch.tensor([2.5]))
    writer.write("codes", codes)
    writer.write("shape", torch.tensor([10, 4]))
    assert not (tmp_path / "new.safetensors").exists()
    writer.finish()
    found = load_file(str(tmp_path / "new.safetensors"))
    assert torch.equal(found["w"], weight)
    assert torch.equal(found["codes"].view(torch.uint8), codes.view(torch.uint8))
    assert found["shape"].tolist() == [10, 4]
    assert found["scale"].tolist() == [2.5]
    assert (tmp_path / "new.safetensors").stat().st_size == writer.num_bytes
    assert sorted(file.name for file in tmp_path.iterdir()) == ["new.safetensors", "old.safetensors"]


def test_bytes_are_copied_as_they_are(tmp_path: Path) -> None:
    data = bytes(range(200))
    (tmp_path / "source").write_bytes(b"head" + data)
    writer = ShardWriter(tmp_path / "new.safetensors", {"x": TensorSpec((200,), "U8")})
    writer.copy("x", tmp_path / "source", 4)
    writer.finish()
    assert load_file(str(tmp_path / "new.safetensors"))["x"].tolist() == list(data)


def test_a_discarded_file_leaves_nothing(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "new.safetensors", {"x": TensorSpec((2,), "U8")})
    writer.discard()
    assert not list(tmp_path.iterdir())


def test_a_source_that_ends_early_and_a_missing_folder_are_named(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"123")
    writer = ShardWriter(tmp_path / "new.safetensors", {"x": TensorSpec((200,), "U8")})
    with pytest.raises(CheckpointError, match="short: tensor 'x': the file ended early"):
        writer.copy("x", tmp_path / "short", 0)
    writer.discard()
    with pytest.raises(ConfigError, match=r"cannot write .*nowhere"):
        ShardWriter(tmp_path / "nowhere" / "new.safetensors", {})


@pytest.mark.parametrize(
    ("kind", "dtype"), [("BF16", torch.bfloat16), ("F16", torch.float16), ("F32", torch.float32)]
)
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_a_copied_value_that_is_not_finite_is_named(
    kind: str, dtype: torch.dtype, value: float, tmp_path: Path
) -> None:
    values = torch.full((700_000,), torch.finfo(dtype).max, dtype=dtype)
    source = tmp_path / "source"
    for place, is_sound in ((None, True), (699_999, False)):
        if place is not None:
            values[place] = value
        source.write_bytes(values.view(torch.uint8).numpy().tobytes())
        writer = ShardWriter(tmp_path / "new.safetensors", {"x": TensorSpec((700_000,), kind)})
        if is_sound:
            writer.copy("x", source, 0)
        else:
            with pytest.raises(CheckpointError, match="source: tensor 'x': not all values are finite"):
                writer.copy("x", source, 0)
        writer.discard()
