import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lean_laguna.core.types import SamplingParams
from lean_laguna.spec.logits import apply_logits_options, apply_temperature, ids_by_row, surviving_ids
from lean_laguna.spec.request import SamplingRequest
from support.logits_reference import reference_scores, reference_survivors

V = 12
tokens = st.lists(st.integers(0, V - 1), max_size=8)
# Quarters: equal logits are common, and sums with them are exact.
rows_of_logits = st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=V, max_size=V)
options = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.sampled_from([0.5, 1.0, 1.25, 2.0]),
        "presence_penalty": st.sampled_from([-1.0, 0.5, 2.0]),
        "frequency_penalty": st.sampled_from([-2.0, 0.25, 1.5]),
        "logit_bias": st.dictionaries(
            st.integers(0, V - 1), st.sampled_from([-100.0, -1.5, 2.0, 100.0]), max_size=4
        ),
        "allowed_token_ids": st.lists(st.integers(0, V - 1), min_size=1, max_size=5),
        "min_tokens": st.integers(0, 12),
        "stop_token_ids": st.lists(st.integers(0, V - 1), max_size=2),
    },
)
bad_words = st.lists(st.lists(st.integers(0, V - 1), min_size=1, max_size=3), max_size=4)


@settings(max_examples=200)
@given(st.data(), options, tokens, tokens, tokens, bad_words)
def test_every_row_gets_the_options_with_its_own_prefix(data, params, prompt, output, drafts, bad):
    params = SamplingParams(max_tokens=None, **params)
    request = SamplingRequest(params, prompt, seed=0, vocab_size=V, eos_token_ids=(3,), bad_word_ids=bad)
    for token in output:
        request.commit([token])
    raw = np.array([data.draw(rows_of_logits) for _ in range(len(drafts) + 1)])
    stops = {3, *params.stop_token_ids}
    expected = [
        reference_scores(row, params, prompt, [*output, *drafts[:index]], stops, bad)
        for index, row in enumerate(raw)
    ]
    scores = raw.copy()
    apply_logits_options(scores, request, drafts)
    assert np.array_equal(scores, expected)
    first = data.draw(st.integers(0, len(drafts)))
    scores = raw[first:].copy()
    apply_logits_options(scores, request, drafts, first)
    assert np.array_equal(scores, expected[first:])


@pytest.mark.parametrize("penalty", [1e-320, 1e-308, 1e308])
def test_the_strongest_repetition_penalty_leaves_numbers(penalty):
    params = SamplingParams(max_tokens=None, repetition_penalty=penalty, frequency_penalty=2.0)
    request = SamplingRequest(params, [1, 2, 3], seed=0, vocab_size=V, eos_token_ids=(3,), bad_word_ids=[])
    scores = np.array([[3.0, 5.0, -7.0, 0.0, *range(V - 4)]])
    apply_logits_options(scores, request, [])
    apply_temperature(scores, np.array([0.7]))
    assert not np.isnan(scores).any()
    assert scores.max() == 0
    assert scores[0].argmax() == (1 if penalty < 1 else V - 1)


@settings(max_examples=200)
@given(
    rows_of_logits,
    st.sampled_from([0.3, 0.8, 1.0, 2.5]),
    st.sampled_from([0.0, 0.01, 0.2, 0.7, 1.0]),
    st.sampled_from([0, 1, 2, 5, V, 50]),
    st.sampled_from([1.0, 0.99, 0.8, 0.5, 0.11, 1e-9]),
)
def test_filters_leave_what_the_definitions_say(logits, temperature, min_p, top_k, top_p):
    params = SamplingParams(temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p)
    scores = np.array([logits])
    apply_temperature(scores, np.array([temperature]))
    (kept,) = surviving_ids(scores, [params])
    expected = reference_survivors(logits, params)
    if kept is None:
        assert expected == set(range(V))
        return
    assert sorted(kept) == list(kept)
    # A token whose share meets a threshold to the last bits may fall on either side of it.
    for token in set(kept.tolist()) ^ expected:
        assert sits_on_a_threshold(logits, params, token)


def sits_on_a_threshold(logits, params, token):
    def left(scale):
        near = SamplingParams(
            temperature=params.temperature,
            min_p=min(1.0, params.min_p * (1 + scale)),
            top_k=params.top_k,
            top_p=min(1.0, params.top_p * (1 + scale)),
        )
        return token in reference_survivors(logits, near)

    return left(1e-9) != left(-1e-9)


def test_filters_never_empty_the_set():
    extreme = SamplingParams(temperature=1e-300, min_p=1.0, top_k=1, top_p=1e-12)
    scores = np.random.default_rng(0).standard_normal((5, 100))
    apply_temperature(scores, np.full(5, extreme.temperature))
    for row, kept in zip(scores, surviving_ids(scores, [extreme] * 5), strict=True):
        assert kept.tolist() == [row.argmax()]


def test_top_k_keeps_ties_and_top_p_takes_lower_ids_first():
    scores = np.array([[0.0, -1.0, 0.0, 0.0, -1.0]])
    assert surviving_ids(scores, [SamplingParams(top_k=2)])[0].tolist() == [0, 2, 3]
    third = math.exp(0) / (3 + 2 * math.exp(-1))
    assert surviving_ids(scores, [SamplingParams(top_p=1.5 * third)])[0].tolist() == [0, 2]


def test_a_wide_nucleus_in_a_large_vocabulary_is_found():
    rng = np.random.default_rng(1)
    scores = rng.standard_normal((2, 5000)) * 8
    scores -= scores.max(axis=1, keepdims=True)
    for top_p in (0.5, 0.999, 1 - 1e-7, 1 - 1e-12):
        for row, kept in zip(scores, surviving_ids(scores, [SamplingParams(top_p=top_p)] * 2), strict=True):
            share = np.exp(row) / np.exp(row).sum()
            assert share[kept].sum() >= top_p - 1e-13
            assert share[kept].sum() - share[kept].min() < top_p + 1e-13
            assert share[kept].min() >= np.delete(share, kept).max()


def test_rows_with_different_filters_do_not_touch_each_other():
    rng = np.random.default_rng(2)
    scores = rng.standard_normal((6, 300)) * 3
    scores -= scores.max(axis=1, keepdims=True)
    params = [
        SamplingParams(),
        SamplingParams(top_k=5),
        SamplingParams(top_p=0.9),
        SamplingParams(min_p=0.1),
        SamplingParams(top_k=9, top_p=0.5, min_p=0.01),
        SamplingParams(top_k=5, min_p=0.5),
    ]
    together = surviving_ids(scores, params)
    assert together[0] is None
    for row in range(1, 6):
        alone = surviving_ids(scores[row : row + 1], [params[row]])[0]
        assert np.array_equal(together[row], alone)


def test_banned_tokens_never_survive_and_a_ban_of_all_tokens_is_left_out():
    request = SamplingRequest(SamplingParams(), (), seed=0, vocab_size=4, bad_word_ids=[(0,), (2,)])
    scores = np.zeros((1, 4))
    apply_logits_options(scores, request)
    apply_temperature(scores, np.ones(1))
    assert scores.tolist() == [[-np.inf, 0, -np.inf, 0]]
    for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.999), SamplingParams(min_p=0.5)):
        assert surviving_ids(scores, [params])[0].tolist() == [1, 3]
    every = SamplingRequest(SamplingParams(), (), seed=0, vocab_size=2, bad_word_ids=[(0,), (1,)])
    scores = np.array([[1.0, 2.0]])
    apply_logits_options(scores, every)
    assert scores.tolist() == [[1.0, 2.0]]


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-5, 1.0, 1e300])
def test_any_temperature_keeps_the_order_and_makes_no_nan(temperature):
    scores = np.array([[3.0, 1.0, 2.0, -np.inf, 3.0]])
    apply_temperature(scores, np.array([temperature]))
    assert scores[0, 0] == scores[0, 4] == 0
    assert scores[0, 2] <= 0
    assert scores[0, 1] <= scores[0, 2]
    assert scores[0, 3] == -np.inf


def test_indices_by_row():
    mask = np.array([[True, False, True], [False, False, False], [False, True, True]])
    assert [ids.tolist() for ids in ids_by_row(mask)] == [[0, 2], [], [1, 2]]
