"""Conversions that vLLM would not load are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lean_laguna.convert.quantize_plan import Rule, group_rules, make_plan, parse_scheme
from lean_laguna.convert.source import Source, open_source
from lean_laguna.convert.vllm_limits import vllm_limits
from support.checkpoints import write_tiny_drafter
from support.quantised import write_target


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return open_source(write_target(Path(tmp_path_factory.mktemp("source"))))


@pytest.mark.parametrize("words", ["experts", "experts+attention", "all", "attention+head"])
def test_whole_classes_are_fine(source: Source, words: str) -> None:
    assert vllm_limits(source, make_plan(source, group_rules(words, parse_scheme("nvfp4")))) == []


def test_integers_in_groups_that_no_kernel_takes_are_named(source: Source) -> None:
    for words, scheme in (("attention", "int8"), ("head", "int4:32"), ("experts", "int4:16")):
        notes = vllm_limits(source, make_plan(source, group_rules(words, parse_scheme(scheme))))
        # Routed experts take any groups; shared ones are linears.
        assert len(notes) == (words == "experts")
    (note,) = vllm_limits(source, make_plan(source, group_rules("attention", parse_scheme("int4:16"))))
    assert note.startswith(
        "vLLM takes linears of 4 bits with a scale per row or in groups of 32, 64, 128, 256: "
    )
    assert note.endswith("has groups of 16")


def test_experts_with_a_scale_per_row_need_a_wide_model(source: Source, tmp_path: Path) -> None:
    (note,) = vllm_limits(source, make_plan(source, group_rules("experts", parse_scheme("int8"))))
    assert "multiple of 128" in note
    wide = open_source(write_target(tmp_path, hidden_size=128))
    assert vllm_limits(wide, make_plan(wide, group_rules("experts", parse_scheme("int8")))) == []


def test_a_config_without_a_class_is_named(tmp_path: Path) -> None:
    folder = write_target(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["architectures"]
    (folder / "config.json").write_text(json.dumps(config))
    source = open_source(folder)
    (note,) = vllm_limits(source, make_plan(source, group_rules("experts", parse_scheme("nvfp4"))))
    assert note == "vLLM finds a model's class by 'architectures', which config.json lacks"


def test_different_schemes_in_what_runs_as_one_are_named(source: Source) -> None:
    rules = [
        Rule(r"re:.*layers\.2\.self_attn\.q_proj$", parse_scheme("int8")),
        Rule(r"re:.*layers\.1\.mlp\.experts\.3\.up_proj$", None),
        *group_rules("experts+attention", parse_scheme("nvfp4")),
    ]
    notes = vllm_limits(source, make_plan(source, rules))
    assert len(notes) == 2
    assert "q, k and v" in notes[0]
    assert "layers.2.self_attn.qkv_proj" in notes[0]
    assert "all experts" in notes[1]
    assert "layers.1.mlp.experts" in notes[1]


def test_blocks_that_do_not_divide_experts_are_named(source: Source) -> None:
    (note,) = vllm_limits(source, make_plan(source, group_rules("experts", parse_scheme("fp8-block"))))
    assert "multiples" in note
    assert "[32, 16]" in note


def test_fp8_linears_of_odd_sizes_are_named(source: Source) -> None:
    (note,) = vllm_limits(source, make_plan(source, group_rules("gates", parse_scheme("fp8-channel"))))
    assert "multiples of 16" in note
    assert "g_proj is [4, 32]" in note


def test_a_quantised_drafter_is_for_this_engine(tmp_path: Path) -> None:
    drafter = open_source(write_tiny_drafter(tmp_path))
    (note,) = vllm_limits(drafter, make_plan(drafter, group_rules("all", parse_scheme("int8"))))
    assert "loads no quantised drafter" in note
