"""What is written into config.json means the modules that were meant."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from lean_laguna.convert.quantize_config import quantization_json, targets_of
from lean_laguna.convert.quantize_plan import Rule, group_rules, make_plan, parse_scheme
from lean_laguna.convert.source import Source, open_source
from lean_laguna.quant.config import compile_target, read_quantization
from support.quantised import convert, write_target
from support.vllm_matching import group_of, its_module


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return open_source(write_target(tmp_path_factory.mktemp("source")))


def test_whole_kinds_are_one_expression(source: Source) -> None:
    experts = [module for module in source.shapes if ".experts." in module]
    assert targets_of(experts, source.shapes) == [
        r"re:.*layers\.\d+\.mlp\.experts\.\d+\.(down_proj|gate_proj|up_proj)$"
    ]
    third = [module for module in experts if "layers.3." in module]
    assert targets_of(third, source.shapes) == [
        r"re:.*layers\.3\.mlp\.experts\.\d+\.(down_proj|gate_proj|up_proj)$"
    ]
    assert targets_of(["lm_head"], source.shapes) == ["lm_head"]
    assert targets_of(["fc"], ["fc", "norm"]) == [r"re:(.*\.)?fc$"]


@pytest.mark.parametrize("seed", range(20))
def test_targets_match_what_was_meant_and_nothing_else(source: Source, seed: int) -> None:
    draw = random.Random(seed)
    every = list(source.shapes)
    meant = set(draw.sample(every, draw.randrange(1, len(every))))
    expressions = [compile_target(target, "x") for target in targets_of(meant, every)]
    assert {module for module in every if any(e.match(module) for e in expressions)} == meant


def test_one_scheme_is_one_group_over_all_linears(source: Source) -> None:
    plan = make_plan(source, group_rules("experts", parse_scheme("nvfp4")))
    written = quantization_json(source, plan)
    assert written["format"] == "nvfp4-pack-quantized"
    assert [group["targets"] for group in written["config_groups"].values()] == [["Linear"]]
    assert "lm_head" in written["ignore"]
    config = read_quantization({"quantization_config": written}, "x")
    assert config is not None
    assert {m for m in source.shapes if config.scheme_of(m)} == set(plan)
    assert config.scheme_of("model.layers.1.mlp.gate") is None
    assert config.scheme_of("model.embed_tokens") is None


def test_a_quantised_head_is_named_for_vllm_whose_head_is_no_linear(source: Source) -> None:
    written = quantization_json(source, make_plan(source, group_rules("all", parse_scheme("nvfp4"))))
    assert [group["targets"] for group in written["config_groups"].values()] == [["Linear", "lm_head"]]


def test_several_schemes_are_groups_of_their_own(source: Source) -> None:
    rules = [
        Rule(r"re:.*layers\.2\.mlp\.experts\.5\.", parse_scheme("int8")),
        *group_rules("experts", parse_scheme("nvfp4")),
        *group_rules("attention", parse_scheme("fp8-block")),
    ]
    plan = make_plan(source, rules)
    written = quantization_json(source, plan)
    assert written["format"] == "mixed-precision"
    config = read_quantization({"quantization_config": written}, "x")
    assert config is not None
    assert {module: config.scheme_of(module) for module in plan} == plan


def test_what_a_source_says_of_its_quantised_linears_stays(source: Source, tmp_path: Path) -> None:
    convert(source.path, tmp_path / "made", "experts", "nvfp4")
    first = open_source(tmp_path / "made")
    plan = make_plan(first, group_rules("attention", parse_scheme("int8")))
    written = quantization_json(first, plan)
    config = read_quantization({"quantization_config": written}, "x")
    assert config is not None
    assert {m: config.scheme_of(m) for m in first.shapes if config.scheme_of(m)} == {
        **first.quantised,
        **plan,
    }


@pytest.mark.parametrize(
    ("words", "rules"),
    [
        ("experts", {}),
        ("experts+attention", {}),
        ("all", {}),
        ("head", {}),
        ("gates+dense", {}),
        ("experts", {"attention": "fp8-channel", "dense": "int8", "head": "int8"}),
        ("experts", {r"re:.*layers\.2\.mlp\.experts\.": "int8", r"re:.*layers\.3\.": "keep"}),
    ],
)
def test_vllm_finds_for_each_of_its_modules_what_was_meant(
    source: Source, words: str, rules: dict[str, str]
) -> None:
    chosen = [Rule(p, None if s == "keep" else parse_scheme(s)) for p, s in rules.items()]
    plan = make_plan(source, [*chosen, *group_rules(words, parse_scheme("nvfp4"))])
    written = quantization_json(source, plan)
    for module in [*source.shapes, "model.embed_tokens"]:
        group = group_of(written, *its_module(module))
        meant = plan.get(module)
        assert (group is None) == (meant is None), module
        if group is not None and meant is not None:
            assert written["config_groups"][group]["weights"] == meant.weights_json(), module
