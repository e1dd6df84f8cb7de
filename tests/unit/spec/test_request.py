import random
from collections import Counter

import pytest

from lean_laguna.core.errors import RequestError
from lean_laguna.core.types import SamplingParams
from lean_laguna.spec.request import SamplingRequest, TokenCounts, bad_word_sequences


def request(params=None, prompt=(1, 2), **given):
    return SamplingRequest(params or SamplingParams(), prompt, seed=0, vocab_size=20, **given)


def test_counts_see_each_rows_own_drafts():
    rng = random.Random(0)
    for _ in range(200):
        prompt = [rng.randrange(12) for _ in range(rng.randint(0, 5))]
        output: list[int] = []
        counts = TokenCounts(prompt)
        for _ in range(rng.randint(0, 4)):
            run = [rng.randrange(12) for _ in range(rng.randint(1, 6))]
            counts.commit(run)
            output += run
        drafts = [rng.randrange(-1, 12) for _ in range(rng.randint(0, 5))]
        first = rng.randint(0, len(drafts))
        ids, in_prompt, rows = counts.rows(drafts, first, len(drafts) + 1 - first)
        assert len(set(ids.tolist())) == len(ids)
        assert {t for t, holds in zip(ids.tolist(), in_prompt, strict=True) if holds} == set(prompt)
        for row, got in enumerate(rows.tolist(), start=first):
            expected = Counter(output) + Counter(t for t in drafts[:row] if t >= 0)
            assert {t: n for t, n in zip(ids.tolist(), got, strict=True) if n} == expected


def test_commit_extends_position_and_output():
    made = request(prompt=(5, 6, 7))
    assert made.next_position == 3
    made.commit([1, 2])
    made.commit([3])
    assert made.next_position == 6
    assert made.output_token_ids == [1, 2, 3]


def test_no_state_is_kept_for_options_that_are_off():
    made = request()
    assert made.counts is None
    assert not made.changes_logits
    assert not made.depends_on_prefix


@pytest.mark.parametrize(
    "given", [{"min_p": 0.0}, {"logit_bias": {}}, {"logit_bias": None}, {"top_k": -1}, {"top_p": 1.0}]
)
def test_neutral_values_are_no_options(given):
    assert not request(SamplingParams(**given)).changes_logits


def test_min_tokens_changes_logits_until_enough_are_out():
    made = request(SamplingParams(min_tokens=2), eos_token_ids=(3,))
    assert made.changes_logits
    made.commit([1, 1])
    assert not made.changes_logits


def test_min_tokens_bans_by_tokens_not_by_steps():
    made = request(SamplingParams(min_tokens=4, stop_token_ids=[9, 99]), eos_token_ids=(3,))
    made.commit([1, 1])
    assert set(made.banned_ids([])) == {3, 9}
    assert set(made.banned_ids([5])) == {3, 9}
    assert made.banned_ids([5, 5]) == []


def test_min_tokens_bans_end_of_sequence_even_where_it_is_ignored():
    assert request(SamplingParams(min_tokens=1, ignore_eos=True), eos_token_ids=(3,)).banned_ids([]) == [3]


def test_bad_words_match_across_committed_tokens_and_drafts():
    made = request(bad_word_ids=[(4,), (5, 6), (5, 7, 8)])
    assert made.depends_on_prefix
    assert made.banned_ids([]) == [4]
    assert made.banned_ids([5]) == [4, 6]
    assert made.banned_ids([5, 7]) == [4, 8]
    made.commit([5])
    assert made.banned_ids([]) == [4, 6]
    assert made.banned_ids([7]) == [4, 8]
    assert made.banned_ids([1, 5]) == [4, 6]


def test_bad_words_do_not_look_at_the_prompt():
    assert request(prompt=(1, 5), bad_word_ids=[(5, 6)]).banned_ids([]) == []


def test_bad_words_of_one_token_do_not_depend_on_the_prefix():
    assert not request(bad_word_ids=[(4,)]).depends_on_prefix


def encode(text):
    known = {
        "cat": [1],
        " cat": [2],
        "dog": [3, 4],
        " dog": [5, 4],
        "hat": [6],
        " hat": [7, 6],
        "ox": [8],
        " ox": [8],
    }
    return known[text]


def test_bad_words_are_tokenised_as_vllm_does():
    assert bad_word_sequences(["cat"], encode) == ((1,), (2,))
    assert bad_word_sequences([" dog"], encode) == ((3, 4), (5, 4))
    assert bad_word_sequences(["hat"], encode) == ((6,),), "another length after a space"
    assert bad_word_sequences(["ox", "ox"], encode) == ((8,),), "the same tokens after a space"
    assert bad_word_sequences([], encode) == ()


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"params": SamplingParams(logit_bias={20: 1.0})}, "logit_bias"),
        ({"params": SamplingParams(logit_bias={-1: 1.0})}, "logit_bias"),
        ({"params": SamplingParams(allowed_token_ids=[3, 20])}, "allowed_token_ids"),
        ({"bad_word_ids": [(3, 20)]}, "bad_words"),
    ],
)
def test_tokens_outside_the_vocabulary_are_refused(given, param):
    with pytest.raises(RequestError, match=r"not in the vocabulary \(0 to 19\)") as caught:
        request(**given)
    assert caught.value.param == param


def test_stop_tokens_outside_the_vocabulary_are_harmless():
    made = request(SamplingParams(stop_token_ids=[5, 500], min_tokens=1), eos_token_ids=(3, 900))
    assert made.stop_ids == [3, 5]
