"""A target with packed weights: banks and linears that decode to what the loader decodes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lean_laguna.core.errors import CheckpointError
from lean_laguna.models.checkpoint import load_laguna
from lean_laguna.models.laguna import LagunaForCausalLM
from lean_laguna.models.packed_parameters import materialise, unpack_parameters
from lean_laguna.models.packing import stack_rows
from support.quantised import change_tensors, convert, convert_mixed, write_target


@pytest.mark.parametrize("scheme", ["nvfp4", "fp8-block", "fp8-channel", "int8", "int4:16", "int8:8"])
def test_packed_weights_decode_to_the_loaded_ones(scheme: str, tmp_path: Path) -> None:
    convert(write_target(tmp_path / "source"), tmp_path / "made", "all", scheme)
    plain, packed = load_laguna(tmp_path / "made"), load_laguna(tmp_path / "made", keep_packed=True)
    held = {name for name, parameter in packed.named_parameters() if parameter.is_meta}
    assert held == set(packed.packed_weights)
    assert len(held) > 30
    for name, parameter in plain.named_parameters():
        found = packed.packed_weights[name].decode() if name in held else packed.get_parameter(name)
        assert torch.equal(found, parameter), name


def test_a_bank_holds_gate_over_up_with_a_divisor_each(tmp_path: Path) -> None:
    convert(write_target(tmp_path / "source"), tmp_path / "made", "experts", "nvfp4", shares_divisors=False)
    weight = load_laguna(tmp_path / "made", keep_packed=True).packed_weights[
        "model.layers.1.mlp.experts.gate_up_proj"
    ]
    assert weight.shape == (8, 32, 32)
    assert weight.codes.shape == (8, 32, 16)
    assert weight.global_scales is not None
    assert weight.global_scales.shape == (8, 2)
    assert (weight.global_scales[:, 0] != weight.global_scales[:, 1]).any()
    assert weight.heights == (16, 16)


def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    write_target(tmp_path / "source", tie_word_embeddings=True)
    convert(tmp_path / "source", tmp_path / "made", "attention", "int8")
    for keep in (False, True):
        target = load_laguna(tmp_path / "made", keep_packed=keep)
        assert target.lm_head.weight is target.model.embed_tokens.weight


def test_formats_may_differ_by_layer_and_a_bank_of_several_is_decoded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert_mixed(write_target(tmp_path / "source"), tmp_path / "made")
    packed = load_laguna(tmp_path / "made", keep_packed=True).packed_weights
    banks = {
        name: weight.scheme.name for name, weight in packed.items() if name.endswith("experts.down_proj")
    }
    assert len(set(banks.values())) == 2
    from lean_laguna.convert.quantize import quantize
    from lean_laguna.convert.quantize_plan import Rule, group_rules, make_plan, parse_scheme
    from lean_laguna.convert.source import open_source

    source = open_source(tmp_path / "source")
    rules = [
        Rule(r"re:.*experts\.3\..*", parse_scheme("int8")),
        *group_rules("experts", parse_scheme("nvfp4")),
    ]
    quantize(source, tmp_path / "odd", make_plan(source, rules))
    plain, found = load_laguna(tmp_path / "odd"), load_laguna(tmp_path / "odd", keep_packed=True)
    assert "experts.gate_up_proj' is decoded in memory" in capsys.readouterr().err
    assert not [name for name in found.packed_weights if ".experts." in name]
    bank = "model.layers.1.mlp.experts.gate_up_proj"
    assert torch.equal(found.get_parameter(bank), plain.get_parameter(bank))


def test_packed_weights_can_be_decoded_afterwards(tmp_path: Path) -> None:
    convert(write_target(tmp_path / "source"), tmp_path / "made", "all", "nvfp4")
    plain, found = load_laguna(tmp_path / "made"), load_laguna(tmp_path / "made", keep_packed=True)
    unpack_parameters(found)
    assert not found.packed_weights
    for name, parameter in plain.named_parameters():
        assert torch.equal(found.get_parameter(name), parameter), name


def test_an_unquantised_checkpoint_has_nothing_to_keep_packed(tmp_path: Path) -> None:
    target = load_laguna(write_target(tmp_path / "source"), keep_packed=True)
    assert not target.packed_weights
    assert not any(parameter.is_meta for parameter in target.parameters())


def test_bad_scales_are_refused_when_packed_too(tmp_path: Path) -> None:
    convert(write_target(tmp_path / "source"), tmp_path / "made", "experts", "nvfp4")
    change_tensors(
        tmp_path / "made", model__layers__1__mlp__experts__0__up_proj__weight_global_scale=torch.zeros(1)
    )
    with pytest.raises(CheckpointError, match="must be above 0"):
        load_laguna(tmp_path / "made", keep_packed=True)


@pytest.mark.parametrize("gating", ["per-head", "off"])
def test_linears_of_one_input_can_lie_side_by_side_from_the_start(tmp_path: Path, gating: str) -> None:
    plain = load_laguna(write_target(tmp_path / "source", gating=gating != "off"))
    with torch.device("meta"):
        model = LagunaForCausalLM(plain.config)
    materialise(model, "cpu", joint=model.read_together())
    model.load_state_dict(plain.state_dict())
    storages = set()
    for group in model.read_together():
        whole = stack_rows([model.get_parameter(name) for name in group])
        storages.add(whole.untyped_storage().data_ptr())
        assert torch.equal(whole, torch.cat([plain.get_parameter(name) for name in group]))
        assert whole.data_ptr() == model.get_parameter(group[0]).data_ptr()
    assert len(storages) == 1
    banks = {p.untyped_storage().data_ptr() for p in model.parameters() if p.dim() == 3}
    assert not banks & storages
    assert all(torch.equal(p, plain.get_parameter(name)) for name, p in model.named_parameters())


def test_a_group_of_which_one_stays_packed_is_laid_out_apart(tmp_path: Path) -> None:
    plain = load_laguna(write_target(tmp_path / "source"))
    with torch.device("meta"):
        model = LagunaForCausalLM(plain.config)
    group = model.read_together()[0]
    materialise(model, "cpu", {group[1]}, model.read_together())
    assert model.get_parameter(group[1]).is_meta
    sizes = [parameter.shape for parameter in model.parameters() if not parameter.is_meta]
    assert len(sizes) == len(list(plain.parameters())) - 1
