"""Weights quantised by pieces are those quantised whole; divisors are shared where engines need it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lean_laguna.convert import weight_encoder
from lean_laguna.convert.quantize_plan import group_rules, make_plan, parse_scheme
from lean_laguna.convert.source import open_source
from lean_laguna.convert.weight_encoder import WeightEncoder, WeightError
from lean_laguna.core.errors import CheckpointError
from lean_laguna.quant.codec import encode
from support.quantised import change_tensors, convert, write_target


@pytest.mark.parametrize("scheme", ["nvfp4", "fp8-block", "fp8-channel", "int8", "int4:16"])
def test_pieces_make_the_tensors_of_the_whole(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_encoder, "_PIECE_WEIGHTS", 1)
    # 384 rows are three pieces.
    source = write_target(tmp_path / "source", num_attention_heads_per_layer=[48, 6, 6, 4])
    convert(source, tmp_path / "made", "attention", scheme, shares_divisors=False)
    plain = load_file(str(source / "model.safetensors"))
    made = load_file(str(tmp_path / "made" / "model.safetensors"))
    for leaf in ("q_proj", "o_proj"):
        name = f"model.layers.0.self_attn.{leaf}"
        for part, expected in encode(plain[f"{name}.weight"], parse_scheme(scheme)).items():
            found = made[f"{name}.{part}"]
            assert found.dtype == expected.dtype
            assert torch.equal(found.view(torch.uint8), expected.contiguous().view(torch.uint8)), (leaf, part)


def test_gate_and_up_and_q_k_v_share_a_divisor(tmp_path: Path) -> None:
    convert(write_target(tmp_path / "source"), tmp_path / "made", "experts+attention", "nvfp4")
    plain = load_file(str(tmp_path / "source" / "model.safetensors"))
    made = load_file(str(tmp_path / "made" / "model.safetensors"))

    def divisors(prefix: str, leaves: tuple[str, ...]) -> set[float]:
        largest = max(plain[f"{prefix}{leaf}.weight"].abs().max() for leaf in leaves)
        found = {made[f"{prefix}{leaf}.weight_global_scale"].item() for leaf in leaves}
        assert found == {(2688 / largest).bfloat16().item()}
        return found

    divisors("model.layers.1.self_attn.", ("q_proj", "k_proj", "v_proj"))
    divisors("model.layers.1.mlp.experts.4.", ("gate_proj", "up_proj"))
    divisors("model.layers.1.mlp.shared_expert.", ("gate_proj", "up_proj"))
    divisors("model.layers.1.mlp.experts.4.", ("down_proj",))


def test_errors_add_up() -> None:
    total = WeightError(4.0, 1.0, 0.5, 2) + WeightError(12.0, 3.0, 0.25, 6)
    assert total == WeightError(16.0, 4.0, 0.5, 8)
    assert total.relative == 0.5
    assert WeightError().relative == 0.0


@pytest.mark.parametrize("scheme", ["nvfp4", "fp8-block", "int8"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_named(scheme: str, value: float, tmp_path: Path) -> None:
    folder = write_target(tmp_path / "source")
    bad = torch.ones(32, 16, dtype=torch.bfloat16)
    bad[7, 3] = value
    change_tensors(folder, model__layers__2__mlp__experts__1__down_proj__weight=bad)
    source = open_source(folder)
    encoder = WeightEncoder(source, make_plan(source, group_rules("experts", parse_scheme(scheme))))
    with pytest.raises(
        CheckpointError, match=r"experts\.1\.down_proj\.weight': 1 or more values are not finite"
    ):
        list(encoder.pieces("model.layers.2.mlp.experts.1.down_proj"))
