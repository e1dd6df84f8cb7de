import pytest

from lean_laguna.core.errors import RequestError
from lean_laguna.core.types import SamplingParams


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", 5),
        ("stop", [5]),
        ("stop", b"x"),
        ("bad_words", 5),
        ("stop_token_ids", 5),
        ("stop_token_ids", "24"),
        ("stop_token_ids", ["24"]),
        ("stop_token_ids", [True]),
        ("stop_token_ids", [-1]),
        ("logit_bias", [1]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [-1]),
        ("allowed_token_ids", ["a"]),
        ("allowed_token_ids", 5),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {1: "a"}),
        ("logit_bias", {1: None}),
        ("logit_bias", {1: float("nan")}),
        ("n", None),
        ("n", 10**9),
        ("top_k", None),
        ("min_tokens", None),
        ("temperature", None),
        ("temperature", 10**400),
        ("repetition_penalty", float("inf")),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(name, value):
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name


def test_a_list_may_be_absent_one_text_or_anything_that_lists():
    params = SamplingParams(stop="a", bad_words=None, stop_token_ids=iter([1, 2]))
    assert (params.stop, params.bad_words, params.stop_token_ids) == (("a",), (), (1, 2))
