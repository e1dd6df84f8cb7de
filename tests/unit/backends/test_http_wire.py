import pytest

from lean_laguna.backends.http_wire import body_of, counts_between, normal_url, speculation_counts
from lean_laguna.core.errors import ConfigError
from lean_laguna.core.types import SamplingParams


@pytest.mark.parametrize(
    ("given", "normal"),
    [
        ("http://h:8000", "http://h:8000"),
        ("http://h:8000/", "http://h:8000"),
        ("http://h:8000/v1", "http://h:8000"),
        ("https://h/v1/", "https://h"),
        ("http://h/proxy/v1", "http://h/proxy"),
    ],
)
def test_an_address_is_taken_with_and_without_v1(given, normal):
    assert normal_url(given) == normal


def test_no_address_says_how_to_write_one():
    with pytest.raises(ConfigError, match=r"write it as http://127\.0\.0\.1:8000"):
        normal_url("localhost:8000")


def test_a_body_holds_what_differs_from_the_defaults_and_nothing_else():
    assert body_of("x", SamplingParams()) == {"prompt": "x", "temperature": 1.0, "max_tokens": 16}
    params = SamplingParams(
        temperature=0, max_tokens=None, stop=("a",), logit_bias={4: -5.0}, structured_outputs={"regex": "a+"}
    )
    assert body_of((1, 2), params) == {
        "prompt": [1, 2],
        "temperature": 0,
        "stop": ["a"],
        "logit_bias": {"4": -5.0},
        "structured_outputs": {"regex": "a+"},
    }


def test_counters_are_summed_over_engines_under_any_prefix():
    text = "\n".join(
        f'{prefix}spec_decode_num_{what}{{model_name="m",engine="{engine}"{more}}} {value}'
        for engine in (0, 1)
        for prefix, what, more, value in (
            ("llamacpp:", "drafts_total", "", 5.0),
            ("llamacpp:", "draft_tokens_total", "", 10),
            ("llamacpp:", "accepted_tokens", "", "6e0"),
            ("llamacpp:", "cut_draft_tokens_total", "", 3),
            ("llamacpp:", "accepted_tokens_per_pos_total", ',position="0"', 4),
            ("llamacpp:", "accepted_tokens_per_pos_total", ',position="2"', 1),
        )
    )
    stats = speculation_counts(text, "m")
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (10, 20, 12)
    assert stats.num_accepted_tokens_per_pos == (8, 0, 2)
    assert stats.num_cut_draft_tokens == 6
    assert counts_between(stats, stats).num_cut_draft_tokens == 0
    assert speculation_counts(text, "other") is None
    assert speculation_counts("# nothing\nprocess_cpu_seconds_total 1.0", "m") is None
