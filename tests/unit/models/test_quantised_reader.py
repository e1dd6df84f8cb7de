"""Quantised checkpoints as logical tensors: what is decoded, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lean_laguna.core.errors import CheckpointError
from lean_laguna.core.model_config import read_config_json
from lean_laguna.models.checkpoint import load_laguna
from lean_laguna.models.quantised_reader import QuantisedReader, open_checkpoint, spellings
from support.quantised import change_tensors, convert, convert_mixed, write_target

EXPERT = "model.layers.1.mlp.experts.3.up_proj"


@pytest.fixture
def nvfp4(tmp_path: Path) -> Path:
    convert(write_target(tmp_path / "source"), tmp_path / "made", "experts", "nvfp4")
    return tmp_path / "made"


def opened(folder: Path) -> QuantisedReader:
    reader = open_checkpoint(folder, read_config_json(folder), str(folder / "config.json"))
    assert isinstance(reader, QuantisedReader)
    return reader


def edit_config(folder: Path, **changes: object) -> None:
    config = read_config_json(folder)
    config["quantization_config"] |= changes
    (folder / "config.json").write_text(json.dumps(config))


def spelt(name: str) -> str:
    return name.replace(".", "__")


def test_a_quantised_weight_appears_once_under_its_plain_name(nvfp4: Path, tmp_path: Path) -> None:
    plain = load_file(str(tmp_path / "source" / "model.safetensors"))
    reader = opened(nvfp4)
    assert set(reader.names()) == set(plain)
    assert all(reader.shape(name) == tuple(plain[name].shape) for name in plain)
    assert reader.dtype_name(f"{EXPERT}.weight") == "F32"
    assert reader.dtype_name("model.norm.weight") == "BF16"


def test_decoding_is_code_times_scale_by_divisor(nvfp4: Path) -> None:
    stored = load_file(str(nvfp4 / "model.safetensors"))
    codes, scales = stored[f"{EXPERT}.weight_packed"], stored[f"{EXPERT}.weight_scale"].float()
    divisor = stored[f"{EXPERT}.weight_global_scale"].item()
    levels = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    found = opened(nvfp4).get(f"{EXPERT}.weight")
    for row in range(16):
        for column in range(32):
            nibble = int(codes[row, column // 2]) >> 4 * (column % 2) & 15
            value = levels[nibble & 7] * (-1 if nibble & 8 else 1)
            expected = value * (scales[row, column // 16].item() / divisor)
            assert found[row, column].item() == pytest.approx(expected, rel=1e-6)


def test_copying_to_a_place_converts_as_torch_does(nvfp4: Path) -> None:
    target = torch.empty(16, 32, dtype=torch.bfloat16)
    opened(nvfp4).copy_to(f"{EXPERT}.weight", target)
    assert torch.equal(target, opened(nvfp4).get(f"{EXPERT}.weight").bfloat16())


def test_every_module_may_have_a_format_of_its_own(tmp_path: Path) -> None:
    convert_mixed(write_target(tmp_path / "source"), tmp_path / "made")
    reader = opened(tmp_path / "made")
    found = {
        reader.scheme_of(f"model.layers.{name}.weight")
        for name in (
            "1.mlp.experts.0.up_proj",
            "2.mlp.experts.0.up_proj",
            "1.self_attn.q_proj",
            "0.mlp.up_proj",
        )
    }
    assert len(found - {None}) == 4
    assert reader.scheme_of("model.layers.1.self_attn.o_proj.weight") is None
    load_laguna(tmp_path / "made")


SCALE, DIVISOR = f"{EXPERT}.weight_scale", f"{EXPERT}.weight_global_scale"
HOLE = torch.ones(16, 2).index_fill(0, torch.tensor([5]), 0.0).to(torch.float8_e4m3fn)
BAD_SCALES = {
    "missing": (SCALE, None, r"tensor '.*3\.up_proj\.weight_scale' is missing.*stored as NVFP4"),
    "no divisor": (DIVISOR, None, r"up_proj\.weight_global_scale' is missing"),
    "zero divisor": (DIVISOR, torch.zeros(1), r"global_scale': scales must be above 0, found 0"),
    "negative": (DIVISOR, -torch.ones(1), "must be above 0, found -1 among 1 of 1"),
    "nan": (DIVISOR, torch.full((1,), torch.nan), "scales must be finite, found nan"),
    "infinite": (DIVISOR, torch.full((1,), torch.inf), "scales must be finite, found inf"),
    "reciprocal": (DIVISOR, torch.full((1,), 2e-4), r"0\.0002 would make weights as large as"),
    "zero group": (SCALE, HOLE, r"weight_scale': scales must be above 0, found 0 among 2 of 32"),
    "shape": (SCALE, HOLE[:, :1].contiguous(), r"shape \[16, 1\], expected \[16, 2\]"),
    "type": (SCALE, torch.ones(16, 2), "found type F32, expected F8_E4M3"),
    "codes": (f"{EXPERT}.weight_packed", None, r"up_proj\.weight_packed' is missing"),
}


@pytest.mark.parametrize("name", BAD_SCALES)
def test_bad_scales_are_refused_by_tensor(nvfp4: Path, name: str) -> None:
    tensor, value, message = BAD_SCALES[name]
    change_tensors(nvfp4, **{spelt(tensor): value})
    with pytest.raises(CheckpointError, match=message) as caught:
        load_laguna(nvfp4)
    assert str(caught.value).startswith(str(nvfp4))


def test_reciprocal_factors_are_refused(tmp_path: Path) -> None:
    convert(write_target(tmp_path / "source"), tmp_path / "made", "attention", "fp8-channel")
    name = "model.layers.0.self_attn.q_proj.weight_scale"
    scales = load_file(str(tmp_path / "made" / "model.safetensors"))[name]
    change_tensors(tmp_path / "made", **{spelt(name): 1 / scales})
    with pytest.raises(CheckpointError, match=r"every scale is above 1 .*looks like the reciprocals"):
        load_laguna(tmp_path / "made")


def test_codes_that_are_no_numbers_are_refused_by_tensor(tmp_path: Path) -> None:
    convert(write_target(tmp_path / "source"), tmp_path / "made", "attention", "fp8-channel")
    name = "model.layers.0.self_attn.q_proj.weight"
    codes = load_file(str(tmp_path / "made" / "model.safetensors"))[name]
    codes.view(torch.uint8)[0, 1] = 0xFF
    change_tensors(tmp_path / "made", **{spelt(name): codes})
    with pytest.raises(CheckpointError, match=r"q_proj\.weight': 1 of \d+ codes are NaN"):
        load_laguna(tmp_path / "made")


def test_config_and_tensors_must_agree(nvfp4: Path) -> None:
    edit_config(nvfp4, ignore=["re:.*"])
    with pytest.raises(CheckpointError, match=r"does not say how 'model\.layers\.1\.mlp\.experts"):
        load_laguna(nvfp4)
    edit_config(nvfp4, ignore=[])
    with pytest.raises(CheckpointError, match=r"found BF16, but .* says that '.*' is stored as NVFP4"):
        load_laguna(nvfp4)


def test_router_embedding_and_norms_are_no_linears(nvfp4: Path) -> None:
    ignore = read_config_json(nvfp4)["quantization_config"]["ignore"]
    edit_config(nvfp4, ignore=[entry for entry in ignore if "gate$" not in entry and "embed" not in entry])
    load_laguna(nvfp4)


def test_modelopts_names_give_the_same_weights(nvfp4: Path) -> None:
    expected = load_laguna(nvfp4)
    stored = load_file(str(nvfp4 / "model.safetensors"))
    renamed: dict[str, torch.Tensor | None] = {}
    for name, tensor in stored.items():
        module, _, part = name.rpartition(".")
        if part == "weight_packed":
            renamed |= {spelt(name): None, spelt(f"{module}.weight"): tensor}
        if part == "weight_global_scale":
            renamed |= {spelt(name): None, spelt(f"{module}.weight_scale_2"): (1 / tensor).view(())}
    change_tensors(nvfp4, **renamed)
    found = load_laguna(nvfp4)
    for name, parameter in expected.named_parameters():
        assert torch.allclose(found.get_parameter(name), parameter, rtol=1e-6, atol=0), name
    bad = next(
        name for name in load_file(str(nvfp4 / "model.safetensors")) if name.endswith("weight_scale_2")
    )
    change_tensors(nvfp4, **{spelt(bad): torch.tensor(5000.0)})
    with pytest.raises(CheckpointError, match=r"weight_scale_2': every scale is above 1"):
        load_laguna(nvfp4)


def test_older_integer_checkpoints_lack_the_shape(tmp_path: Path) -> None:
    convert(write_target(tmp_path / "source"), tmp_path / "made", "experts", "int4:16")
    expected = load_laguna(tmp_path / "made")
    names = [n for n in load_file(str(tmp_path / "made" / "model.safetensors")) if n.endswith("weight_shape")]
    change_tensors(tmp_path / "made", **{spelt(name): None for name in names})
    found = load_laguna(tmp_path / "made")
    assert all(torch.equal(p, found.get_parameter(name)) for name, p in expected.named_parameters())


def test_reordered_columns_take_their_own_groups_scales(tmp_path: Path) -> None:
    convert(write_target(tmp_path / "source"), tmp_path / "made", "attention", "int4:16")
    name = "model.layers.0.self_attn.q_proj.weight"
    plain = opened(tmp_path / "made").get(name)
    scales = load_file(str(tmp_path / "made" / "model.safetensors"))[f"{name}_scale"].float()
    groups = torch.arange(32, dtype=torch.int32) % 2
    change_tensors(tmp_path / "made", **{spelt(f"{name}_g_idx"): groups})
    found = opened(tmp_path / "made").get(name)
    codes = plain / scales.repeat_interleave(16, 1)
    assert torch.allclose(found, codes * scales[:, groups.long()])


@pytest.mark.parametrize(
    ("key", "value"),
    [("self_attn.k_scale", 1.0), ("self_attn.k_scale", 0.25), ("self_attn.k_proj.k_scale", 0.25)],
)
def test_scales_of_the_cache_are_kept_by_layer(nvfp4: Path, key: str, value: float) -> None:
    change_tensors(nvfp4, **{spelt(f"model.layers.2.{key}"): torch.tensor(value)})
    assert load_laguna(nvfp4).kv_scales == {"model.layers.2.self_attn.k_scale": value}


def test_a_useless_scale_of_the_cache_is_refused(nvfp4: Path) -> None:
    change_tensors(nvfp4, model__layers__2__self_attn__v_scale=torch.tensor(0.0))
    with pytest.raises(CheckpointError, match=r"2\.self_attn\.v_scale': expected one finite number above 0"):
        load_laguna(nvfp4)


def test_spellings_are_with_and_without_prefixes() -> None:
    name = "language_model.model.layers.0.self_attn.q_proj"
    assert {"layers.0.self_attn.q_proj", "model.layers.0.self_attn.q_proj", name} <= set(spellings(name))


def same_weights(a: Path, b: Path) -> bool:
    found, expected = load_laguna(a), load_laguna(b)
    return all(torch.equal(p, expected.get_parameter(name)) for name, p in found.named_parameters())


def copy_of(folder: Path, place: Path) -> Path:
    place.mkdir()
    for file in folder.iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    return place


def test_deepseeks_names_give_the_same_weights(tmp_path: Path) -> None:
    convert(write_target(tmp_path / "source"), tmp_path / "made", "experts", "fp8-block")
    other = copy_of(tmp_path / "made", tmp_path / "other")
    stored = load_file(str(other / "model.safetensors"))
    renamed = {spelt(name): None for name in stored if name.endswith("_scale")}
    renamed |= {spelt(f"{name}_inv"): tensor for name, tensor in stored.items() if name.endswith("_scale")}
    change_tensors(other, **renamed)
    config = read_config_json(other)
    config["quantization_config"] = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "activation_scheme": "dynamic",
        "modules_to_not_convert": ["self_attn", "model.layers.0.mlp"],
    }
    (other / "config.json").write_text(json.dumps(config))
    assert same_weights(other, tmp_path / "made")


def test_scales_of_rows_may_lack_their_last_dimension(tmp_path: Path) -> None:
    convert(write_target(tmp_path / "source"), tmp_path / "made", "experts", "fp8-channel")
    other = copy_of(tmp_path / "made", tmp_path / "other")
    stored = load_file(str(other / "model.safetensors"))
    flat = {spelt(name): tensor.view(-1) for name, tensor in stored.items() if name.endswith("_scale")}
    change_tensors(other, **flat)
    assert same_weights(other, tmp_path / "made")


def test_stored_activation_scales_must_be_there_and_usable(nvfp4: Path) -> None:
    group = read_config_json(nvfp4)["quantization_config"]["config_groups"]["group_0"]
    local = {**group["weights"], "dynamic": "local"}
    edit_config(nvfp4, config_groups={"group_0": {**group, "input_activations": local}})
    with pytest.raises(CheckpointError, match=r"input_global_scale' is missing"):
        load_laguna(nvfp4)
    names = [n for n in load_file(str(nvfp4 / "model.safetensors")) if n.endswith("weight_packed")]
    parts = {
        spelt(name.replace("weight_packed", "input_global_scale")): torch.tensor([30.0]) for name in names
    }
    change_tensors(nvfp4, **parts)
    load_laguna(nvfp4)
    change_tensors(nvfp4, **{spelt(f"{EXPERT}.input_global_scale"): torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"up_proj\.input_global_scale': scales must be above 0"):
        load_laguna(nvfp4)


def test_names_below_a_prefix_are_the_configs_names(nvfp4: Path, tmp_path: Path) -> None:
    other = copy_of(nvfp4, tmp_path / "other")
    stored = load_file(str(other / "model.safetensors"))
    renamed = {spelt(name): None for name in stored}
    renamed |= {spelt(f"language_model.{name}"): tensor for name, tensor in stored.items()}
    change_tensors(other, **renamed)
    config = read_config_json(other)["quantization_config"]
    targets = [r"re:^model\.layers\.\d+\.mlp\.(experts\.\d+|shared_expert)\..*_proj$"]
    edit_config(other, config_groups={"group_0": {**config["config_groups"]["group_0"], "targets": targets}})
    assert same_weights(other, nvfp4)
