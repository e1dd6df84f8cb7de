from lean_laguna.core.types import Logprob
from lean_laguna.server.logprobs import LEAST_LOGPROB, LegacyLogprobs, chat_logprobs, prompt_logprobs
from support.engines import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
A, B, C = (TOKENIZER.encode(text)[0] for text in "abc")
HIGH_BYTES = [i for i in range(256) if TOKENIZER.token_text(i) == "\ufffd"][:2]


def candidates(*pairs):
    return {
        token: Logprob(value, rank, TOKENIZER.token_text(token))
        for rank, (token, value) in enumerate(pairs, 1)
    }


def test_legacy_lists_run_in_parallel_and_offsets_go_on_over_pieces():
    legacy = LegacyLogprobs(TOKENIZER, 1, as_token_ids=False, offset=0)
    legacy.add([A, B], [None, candidates((C, -0.5), (B, -1.0))])
    first = legacy.take()
    assert first == {
        "text_offset": [0, 1],
        "tokens": ["a", "b"],
        "token_logprobs": [None, -1.0],
        "top_logprobs": [None, {"c": -0.5, "b": -1.0}],
    }
    legacy.add([C], [candidates((C, 0.0))])
    assert legacy.take()["text_offset"] == [2]


def test_of_tokens_that_look_alike_the_more_probable_one_stands():
    # A harness compares the chosen token's value with the largest one: it must not be hidden by a lesser one.
    first, second = HIGH_BYTES
    legacy = LegacyLogprobs(TOKENIZER, 2, as_token_ids=False)
    legacy.add([second], [candidates((first, -0.1), (second, -3.0))])
    assert legacy.take()["top_logprobs"] == [{"\ufffd": -0.1}]
    named = LegacyLogprobs(TOKENIZER, 2, as_token_ids=True)
    named.add([second], [candidates((first, -0.1), (second, -3.0))])
    assert named.take()["top_logprobs"] == [{f"token_id:{first}": -0.1, f"token_id:{second}": -3.0}]


def test_no_candidates_asked_for_gives_null_and_the_chosen_token_alone():
    legacy = LegacyLogprobs(TOKENIZER, 0, as_token_ids=False)
    legacy.add([A], [candidates((A, float("-inf")))])
    taken = legacy.take()
    assert (taken["top_logprobs"], taken["token_logprobs"]) == ([None], [LEAST_LOGPROB])


def test_chat_entries_carry_bytes_and_the_top_by_rank():
    found = candidates((B, -0.2), (C, -0.4), (A, -2.0))
    (entry,) = chat_logprobs(TOKENIZER, [A], [found], 2, as_token_ids=False)["content"]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("a", -2.0, [ord("a")])
    assert [top["token"] for top in entry["top_logprobs"]] == ["b", "c"]


def test_prompt_entries_are_by_token_id():
    assert prompt_logprobs(None) is None
    first, second = prompt_logprobs([None, candidates((A, -1.0))])
    assert first is None
    assert second == {str(A): {"logprob": -1.0, "rank": 1, "decoded_token": "a"}}
