import pytest

from lean_laguna.cli.serve import build_parser
from lean_laguna.cli.serve_flags import ALIASES, in_our_names, refuse_unsupported
from lean_laguna.core.errors import ConfigError


def test_other_servers_names_mean_ours():
    words = ["-m", "nano", "-c", "512", "-np", "2", "--jinja", "-md", "nano-dflash", "--spec-draft-n-max=4"]
    args = build_parser().parse_strictly(words)
    assert (args.model_flag, args.max_model_len, args.max_num_seqs) == ("nano", 512, 2)
    assert (args.drafter, args.num_speculative_tokens) == ("nano-dflash", 4)


def test_what_is_so_anyway_is_taken_and_what_is_not_is_refused():
    words = ["--spec-type", "draft-dflash", "--reasoning-budget=-1", "--reasoning-format", "auto"]
    refuse_unsupported(build_parser().parse_strictly([*words, "--speculative-algorithm", "DFLASH"]))
    for words, said in (
        (["--speculative-algorithm", "EAGLE3"], "only DFLASH or DSPARK is supported here, found 'EAGLE3'"),
        (["--reasoning-budget", "100"], "only -1 is supported here, found '100'"),
        (["--mem-fraction-static", "0.8"], "give the bytes: --kv-cache-memory-bytes"),
        (["--gpu-memory-utilization", "0.9"], "give the bytes: --kv-cache-memory-bytes"),
    ):
        with pytest.raises(ConfigError, match=said):
            refuse_unsupported(build_parser().parse_strictly(words))


def test_every_alias_is_a_flag_of_the_parser():
    assert set(ALIASES.values()) <= set(build_parser().option_strings())


def test_sglangs_count_includes_the_anchor():
    assert in_our_names(["--speculative-num-draft-tokens", "16"]) == ["--num-speculative-tokens", "15"]
    assert in_our_names(["--speculative-num-draft-tokens=8"]) == ["--num-speculative-tokens", "7"]
    with pytest.raises(ConfigError, match="must be a whole number from 1"):
        in_our_names(["--speculative-num-draft-tokens", "none"])


def test_underscores_in_flags_are_dashes_and_values_stay():
    assert in_our_names(["--max_model_len", "a_b", "--api_key=x_y"]) == [
        "--max-model-len",
        "a_b",
        "--api-key=x_y",
    ]
