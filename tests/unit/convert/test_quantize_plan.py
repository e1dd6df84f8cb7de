"""Rules of the command line, matched with linears."""

from __future__ import annotations

from pathlib import Path

import pytest

from lean_laguna.convert.modules import class_of
from lean_laguna.convert.quantize_plan import (
    Rule,
    group_rules,
    like_schemes,
    make_plan,
    parse_scheme,
    scheme_of_class,
)
from lean_laguna.convert.source import Source, open_source
from lean_laguna.core.errors import ConfigError
from lean_laguna.quant.scheme import FP8_BLOCK, NVFP4, packed_integer
from support.quantised import convert, convert_mixed, write_target


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return open_source(write_target(tmp_path_factory.mktemp("source")))


def test_schemes_are_words() -> None:
    assert parse_scheme("nvfp4") == NVFP4
    assert parse_scheme("fp8-block") == FP8_BLOCK
    assert parse_scheme("int4") == packed_integer(4, 128)
    assert parse_scheme("int4", 64) == packed_integer(4, 64)
    assert parse_scheme("int4:32", 64) == packed_integer(4, 32)
    assert parse_scheme("int4:row") == packed_integer(4, None)
    assert parse_scheme("int8") == packed_integer(8, None)
    assert parse_scheme("int8", 64) == packed_integer(8, 64)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("nvpf4", "scheme 'nvpf4' is unknown; did you mean 'nvfp4'?"),
        ("nvfp4:32", "no group size to choose"),
        ("int4:x", "must be a whole number from 1 or 'row'"),
        ("int4:0", "must be a whole number from 1 or 'row'"),
    ],
)
def test_wrong_words_are_refused(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_scheme(word)


def test_classes_mean_their_linears(source: Source) -> None:
    plan = make_plan(source, group_rules("experts+attention", NVFP4))
    assert {class_of(module) for module in plan} == {"experts", "shared", "attention"}
    assert len(plan) == 3 * 8 * 3 + 3 * 3 + 4 * 4
    everything = make_plan(source, group_rules("all", NVFP4)) if "fc" in source.shapes else None
    assert everything is None or len(everything) == len(source.shapes)


def test_the_first_rule_that_matches_counts(source: Source) -> None:
    rules = [
        Rule("model.layers.1.self_attn.q_proj", None),
        Rule(r"re:.*layers\.2\.self_attn\.", parse_scheme("int8")),
        *group_rules("attention", NVFP4),
    ]
    plan = make_plan(source, rules)
    assert "model.layers.1.self_attn.q_proj" not in plan
    assert plan["model.layers.2.self_attn.q_proj"] == packed_integer(8, None)
    assert plan["model.layers.3.self_attn.q_proj"] == NVFP4


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("re:.*q_porj$", r"the pattern 're:.*q_porj\$' matches no linear"),
        ("model.layers.1.self_attn.q_porj", r"did you mean 'model\.layers\.N\.self_attn\.q_proj'"),
        ("fc", "has no linears of class 'fc'; it has: "),
        ("re:((", "is not a regular expression"),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error(source: Source, pattern: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_plan(source, [Rule(pattern, NVFP4)])


def test_unknown_classes_come_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="modules 'expert' are unknown; did you mean 'experts'"):
        group_rules("expert", NVFP4)


def test_a_group_that_does_not_divide_a_weight_names_it(source: Source) -> None:
    with pytest.raises(ConfigError, match=r"experts\.0\.down_proj': .*groups of 128.*group sizes 16, 8"):
        make_plan(source, group_rules("experts", parse_scheme("int4")))


def test_it_names_a_group_size_that_fits_all_of_them(source: Source) -> None:
    rules = group_rules("experts", parse_scheme("int8:96"))
    with pytest.raises(ConfigError, match=r"; --scheme int8:16 or --scheme int8:8 fits all 81 weights"):
        make_plan(source, rules)
    make_plan(source, group_rules("experts", parse_scheme("int8:16")))


def test_rules_that_keep_everything_are_an_error(source: Source) -> None:
    with pytest.raises(ConfigError, match="leave everything as it is"):
        make_plan(source, [Rule("attention", None)])


def test_what_is_quantised_already_is_not_quantised_again(source: Source, tmp_path: Path) -> None:
    convert(source.path, tmp_path / "made", "experts", "nvfp4")
    with pytest.raises(ConfigError, match="is stored as NVFP4 already"):
        make_plan(open_source(tmp_path / "made"), group_rules("experts", parse_scheme("int8")))


def test_another_checkpoints_schemes_are_taken_over(source: Source, tmp_path: Path) -> None:
    convert_mixed(source.path, tmp_path / "made")
    model = open_source(tmp_path / "made")
    schemes, notes = like_schemes(source, model)
    assert schemes == dict(model.quantised)
    assert not notes
    assert scheme_of_class(model, "attention").name == "FP8 channel"
    with pytest.raises(ConfigError, match="expected one scheme for its experts, found INT8 group 16, NVFP4"):
        scheme_of_class(model, "experts")
    with pytest.raises(ConfigError, match="expected one scheme for its head, found none"):
        scheme_of_class(model, "head")
    with pytest.raises(ConfigError, match=r"quantises no linear that .* holds unquantised"):
        like_schemes(source, source)
