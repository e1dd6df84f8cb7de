"""What a file's tensors become."""

from __future__ import annotations

from pathlib import Path

from lean_laguna.convert.quantize_plan import group_rules, make_plan, parse_scheme
from lean_laguna.convert.shard_layout import is_encoded, shard_layout
from lean_laguna.convert.source import open_source
from lean_laguna.quant.scheme import TensorSpec
from support.quantised import write_target


def test_a_weight_becomes_its_parts_and_wide_types_come_first(tmp_path: Path) -> None:
    source = open_source(write_target(tmp_path / "source"))
    schemes = make_plan(source, group_rules("experts", parse_scheme("nvfp4")))
    expert = "model.layers.1.mlp.experts.0.down_proj"
    norm = "model.norm.weight"
    rows, columns = source.shapes[expert]
    layout = shard_layout(source, [f"{expert}.weight", norm], schemes)
    assert layout == {
        f"{expert}.weight_global_scale": TensorSpec((1,), "F32"),
        norm: TensorSpec((source.tensors.shape(norm)), "BF16"),
        f"{expert}.weight_packed": TensorSpec((rows, columns // 2), "U8"),
        f"{expert}.weight_scale": TensorSpec((rows, columns // 16), "F8_E4M3"),
    }
    sizes = [spec.element_bytes for spec in layout.values()]
    assert sizes == sorted(sizes, reverse=True)


def test_only_weights_of_chosen_linears_are_encoded(tmp_path: Path) -> None:
    source = open_source(write_target(tmp_path / "source"))
    schemes = make_plan(source, group_rules("attention", parse_scheme("int8")))
    assert is_encoded("model.layers.0.self_attn.q_proj.weight", schemes)
    assert not is_encoded("model.layers.0.self_attn.q_proj.bias", schemes)
    assert not is_encoded("model.layers.0.self_attn.g_proj.weight", schemes)
