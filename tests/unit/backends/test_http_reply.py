import pytest

from lean_laguna.backends.http_reply import CompletionReader
from lean_laguna.core.errors import BackendError
from lean_laguna.core.types import Logprob, SamplingParams

PARAMS = SamplingParams(logprobs=2)


def chunk(text, ids=None, used=None, **choice):
    event = {"choices": [{"text": text, **({"token_ids": ids} if ids else {}), **choice}]}
    return event | ({"usage": {"prompt_tokens": 4, "completion_tokens": used}} if used is not None else {})


def read(*events, params=PARAMS):
    reader = CompletionReader(params)
    for event in events:
        reader.take(event)
    return reader


def test_tokens_are_the_servers_count_however_many_chunks_there_are():
    reader = read(chunk("ab", used=3), chunk("", used=3), chunk("c", used=9, finish_reason="stop"))
    result = reader.result("there")
    assert reader.has_running_usage
    assert (result.num_tokens, result.text, result.finish_reason) == (9, "abc", "stop")
    assert len(result.arrivals_s) == 2
    assert result.num_decode_tokens == 8


def test_ids_count_only_where_they_are_all():
    last = {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 3}}
    assert read(chunk("a", [1]), chunk("b", [2, 3]), last).result("there").token_ids == (1, 2, 3)
    assert read(chunk("a", [1]), chunk("b"), last).result("there").token_ids == ()


def test_without_any_count_there_is_no_result():
    with pytest.raises(BackendError, match="there: the stream ended without 'usage'"):
        read(chunk("a")).result("there")


def test_candidates_are_known_by_id_where_the_server_names_ids():
    found = {
        "tokens": ["token_id:7", "token_id:9"],
        "token_logprobs": [-0.5, -3.0],
        "top_logprobs": [{"token_id:7": -0.5, "token_id:8": -1.0}, {"token_id:5": -0.1, "x": -0.2}],
    }
    result = read(chunk("ab", [7, 9], used=2, logprobs=found)).result("there")
    assert result.logprobs == (
        {7: Logprob(-0.5, 1), 8: Logprob(-1.0, 2)},
        {9: Logprob(-3.0, 3), 5: Logprob(-0.1, 1)},
    )
    unasked = read(chunk("ab", [7, 9], used=2, logprobs=found), params=SamplingParams())
    assert unasked.result("there").logprobs is None


def test_the_servers_own_numbers_become_counts_by_position():
    found = {"acceptance_histogram": [1, 2, 3], "num_spec_steps": 6}
    found |= {"num_draft_tokens": 12, "num_accepted_draft_tokens": 8}
    last = {"choices": [], "usage": {"completion_tokens": 1}, "metrics": {"speculative_decoding": found}}
    stats = read(chunk("a"), last).result("there").speculation
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (6, 12, 8)
    assert stats.num_accepted_tokens_per_pos == (5, 3)


def test_a_chat_counts_its_thinking_as_tokens_too():
    events = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"reasoning": "hm"}}]},
        {"choices": [{"delta": {"content": "yes"}, "finish_reason": "tool_calls"}]},
        {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 5}},
    ]
    result = read(*events).result("there")
    assert (result.text, len(result.arrivals_s), result.finish_reason) == ("yes", 2, None)
