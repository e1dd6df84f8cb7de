"""The quantiser held against another checkpoint's own bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lean_laguna.convert import worker_pool
from lean_laguna.convert.quantize_proof import prove, shares_divisors
from lean_laguna.convert.source import open_source
from lean_laguna.core.errors import CheckpointError, ConfigError
from support.quantised import change_tensors, convert, convert_mixed, write_target


@pytest.mark.parametrize("scheme", ["nvfp4", "fp8-block", "int4:16"])
def test_its_own_checkpoints_are_made_again_to_the_byte(scheme: str, tmp_path: Path) -> None:
    source = write_target(tmp_path / "source")
    convert(source, tmp_path / "made", "experts", scheme)
    proof = prove(open_source(source), open_source(tmp_path / "made"))
    assert proof.num_modules == 81
    assert proof.num_weights == 81 * 32 * 16
    assert proof.num_differing_bytes == 0
    made = load_file(str(tmp_path / "made" / "model.safetensors"))
    parts = ("weight_packed", "weight_scale", "weight_global_scale")
    expected = sum(
        tensor.nbytes
        for name, tensor in made.items()
        if ".experts." in name or "shared" in name
        if name.endswith((*parts, ".weight"))
    )
    assert proof.num_bytes == expected


def test_processes_count_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_target(tmp_path / "source")
    convert(source, tmp_path / "made", "experts", "nvfp4")
    other = write_target(tmp_path / "other", seed=1)
    given, made = open_source(other), open_source(tmp_path / "made")
    alone = prove(given, made)
    assert alone.num_differing_bytes > 1000
    monkeypatch.setattr(worker_pool, "_OWN_THREADS", 0)
    assert prove(given, made, num_workers=1) == alone


def test_mixed_formats_are_made_again_too(tmp_path: Path) -> None:
    source = write_target(tmp_path / "source")
    convert_mixed(source, tmp_path / "made")
    assert prove(open_source(source), open_source(tmp_path / "made")).num_differing_bytes == 0


def test_divisors_of_their_own_are_noticed(tmp_path: Path) -> None:
    source = write_target(tmp_path / "source")
    convert(source, tmp_path / "made", "experts", "nvfp4", shares_divisors=False)
    model = open_source(tmp_path / "made")
    assert not shares_divisors(model)
    proof = prove(open_source(source), model)
    assert not proof.has_shared_divisors
    assert proof.num_differing_bytes == 0


def test_every_differing_byte_is_counted_and_its_linear_named(tmp_path: Path) -> None:
    source = write_target(tmp_path / "source")
    convert(source, tmp_path / "made", "experts", "nvfp4")
    name = "model.layers.3.mlp.experts.6.down_proj"
    codes = load_file(str(tmp_path / "made" / "model.safetensors"))[f"{name}.weight_packed"].clone()
    codes[3, :5] ^= 1
    change_tensors(tmp_path / "made", **{f"{name}.weight_packed".replace(".", "__"): codes})
    proof = prove(open_source(source), open_source(tmp_path / "made"))
    assert proof.num_differing_bytes == 5
    assert proof.differing_modules == (name,)


def test_checkpoints_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    source = write_target(tmp_path / "source")
    convert(source, tmp_path / "made", "experts", "nvfp4")
    other = write_target(tmp_path / "other", moe_intermediate_size=32)
    with pytest.raises(CheckpointError, match=r"has shape \[32, 16\], but \[32, 32\] in"):
        prove(open_source(other), open_source(tmp_path / "made"))
    with pytest.raises(ConfigError, match="holds none of the linears unquantised"):
        prove(open_source(tmp_path / "made"), open_source(tmp_path / "made"))


def test_prefixes_and_spellings_do_not_matter(tmp_path: Path) -> None:
    source = write_target(tmp_path / "source")
    convert(source, tmp_path / "made", "experts", "nvfp4")
    tensors = load_file(str(source / "model.safetensors"))
    renamed = {}
    for name, tensor in tensors.items():
        renamed[name.replace(".", "__")] = None
        other = "language_model." + name.replace(".shared_expert.", ".shared_experts.")
        renamed[other.replace(".", "__")] = tensor
    change_tensors(source, **renamed)
    assert torch.equal(
        load_file(str(source / "model.safetensors"))["language_model.model.norm.weight"],
        tensors["model.norm.weight"],
    )
    assert prove(open_source(source), open_source(tmp_path / "made")).num_differing_bytes == 0
