import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lean_laguna.core.types import Logprob, SamplingParams
from lean_laguna.engine.output import Completion

EOS = 0


class ByteDetokenizer:
    """Token i is byte i; holds back unfinished characters."""

    def __init__(self):
        self._held = b""

    def push(self, ids):
        self._held += bytes(ids)
        for keep in range(min(4, len(self._held) + 1)):
            head = self._held[: len(self._held) - keep]
            try:
                text = head.decode()
            except UnicodeDecodeError:
                continue
            self._held = self._held[len(head) :]
            return text
        return ""

    def flush(self):
        self._held = b""
        return ""


def completion(params=None, max_tokens=100, **kwargs):
    params = params or SamplingParams(max_tokens=max_tokens, **kwargs)
    return Completion(params, max_tokens, (EOS,), ByteDetokenizer())


def feed(state, runs, with_logprobs=False):
    """Append runs until the completion ends; return what a stream would have shown."""
    shown = ""
    for run in runs:
        logprobs = [{token: Logprob(-float(token), 1)} for token in run] if with_logprobs else None
        state.append(run, len(run) - 1, logprobs)
        shown += state.delta("r", 0, False).text
        if state.finish_reason:
            break
    return shown


def split(tokens, sizes):
    runs, rest = [], list(tokens)
    for size in itertools.cycle(sizes):
        if not rest:
            return runs
        runs.append(rest[:size])
        rest = rest[size:]


def test_eos_inside_a_run_ends_it_there():
    state = completion()
    assert state.append([*b"ab", EOS, *b"cd"], 4) == 3
    assert (state.text, state.finish_reason, state.stop_reason) == ("ab", "stop", None)
    assert state.token_ids == [*b"ab", EOS]
    assert state.is_draft_token == [True, True, True]


def test_an_end_that_is_none_is_reported_as_an_error():
    state = completion()
    state.append([*b"ab", EOS], 0)
    state.fail("gave up")
    delta = state.delta("r", 0, True)
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("ab", "error", "gave up")
    assert state.snapshot(0, 1, None).finish_reason == "error"


def test_ignored_eos_is_text():
    state = completion(ignore_eos=True)
    state.append([*b"ab", EOS, *b"cd"], 4)
    assert state.finish_reason is None
    assert state.text == "ab\x00cd"


def test_stop_token_is_named_and_kept_out_of_the_text():
    state = completion(stop_token_ids=[ord("c")])
    state.append(list(b"abcd"), 3)
    assert (state.text, state.finish_reason, state.stop_reason) == ("ab", "stop", ord("c"))
    kept = completion(stop_token_ids=[ord("c")], include_stop_str_in_output=True)
    kept.append(list(b"abcd"), 3)
    assert kept.text == "abc"


def test_limit_cuts_the_run_and_the_flags():
    state = completion(max_tokens=3)
    assert state.append(list(b"abcdef"), 5) == 3
    assert (state.text, state.finish_reason) == ("abc", "length")
    assert state.is_draft_token == [True, True, True]


def test_stop_before_the_limit_in_one_run_wins():
    state = completion(max_tokens=4, stop=["bc"])
    state.append(list(b"abcdef"), 5)
    assert (state.text, state.finish_reason, state.stop_reason) == ("a", "stop", "bc")
    assert state.token_ids == list(b"abc")


def test_stop_text_on_the_last_allowed_token_is_a_stop():
    state = completion(max_tokens=3, stop=["bc"])
    state.append(list(b"abcdef"), 5)
    assert (state.finish_reason, state.stop_reason) == ("stop", "bc")


def test_limit_before_the_stop_in_one_run_wins():
    state = completion(max_tokens=2, stop=["bc"])
    state.append(list(b"abcdef"), 5)
    assert (state.text, state.finish_reason, state.stop_reason) == ("ab", "length", None)


def test_stop_text_complete_first_wins():
    state = completion(stop=["abcd", "b"])
    state.append(list(b"abcd"), 3)
    assert (state.text, state.stop_reason) == ("a", "b")


def test_stop_text_can_be_kept():
    state = completion(stop=["bc"], include_stop_str_in_output=True)
    state.append(list(b"abcd"), 3)
    assert state.text == "abc"


def test_tail_that_could_become_a_stop_is_held_back():
    state = completion(stop=["hello"])
    state.append(list(b"say hel"), 0)
    assert state.text == "say "
    state.append(list(b"p"), 0)
    assert state.text == "say help"
    state.append(list(b" hell"), 0)
    assert state.text == "say help "
    state.abort()
    assert state.text == "say help hell"
    assert state.finish_reason == "abort"


def test_min_tokens_keeps_a_stop_text_from_ending_early():
    state = completion(stop=["ab"], min_tokens=3)
    state.append(list(b"ababab"), 0)
    assert state.finish_reason == "stop"
    assert state.text == "ab"
    assert state.token_ids == list(b"abab")


def test_logprobs_end_with_the_tokens():
    state = completion(stop=["cd"], logprobs=0)
    feed(state, [list(b"abcdef")], with_logprobs=True)
    assert len(state.logprobs) == len(state.token_ids) == 4
    snapshot = state.snapshot(0, 7, None)
    assert snapshot.cumulative_logprob == -float(sum(b"abcd"))
    assert snapshot.seed == 7


def test_deltas_add_up_to_the_snapshot():
    state = completion()
    state.append(list("a€".encode())[:2], 0)
    first = state.delta("r", 0, False)
    state.append([*list("a€".encode())[2:], EOS], 2)
    second = state.delta("r", 0, True)
    assert first.text + second.text == state.text == "a€"
    assert first.token_ids + second.token_ids == tuple(state.token_ids)
    assert second.is_request_finished
    assert second.is_draft_token == (True, True, False)


TEXT = st.text(alphabet="abc€", max_size=30)


@settings(max_examples=300)
@given(
    text=TEXT,
    stops=st.lists(st.text(alphabet="abc€", min_size=1, max_size=4), max_size=3),
    max_tokens=st.integers(1, 40),
    min_tokens=st.integers(0, 5),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    eos_at=st.one_of(st.none(), st.integers(0, 30)),
    keeps=st.booleans(),
)
def test_result_does_not_depend_on_how_tokens_are_grouped(
    text, stops, max_tokens, min_tokens, sizes, eos_at, keeps
):
    tokens = list(text.encode())
    if eos_at is not None:
        tokens.insert(min(eos_at, len(tokens)), EOS)
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min(min_tokens, max_tokens),
        stop=stops,
        logprobs=0,
        include_stop_str_in_output=keeps,
    )
    results = []
    for grouping in ([1], sizes):
        state = completion(params, max_tokens)
        shown = feed(state, split(tokens, grouping), with_logprobs=True)
        if state.finish_reason is None:
            state.abort()
            shown += state.delta("r", 0, True).text
        assert shown == state.text
        assert len(state.token_ids) == len(state.logprobs) == len(state.is_draft_token) <= max_tokens
        results.append((state.token_ids, state.text, state.logprobs, state.finish_reason, state.stop_reason))
    assert results[0] == results[1]


@given(
    text=TEXT,
    stop=st.text(alphabet="abc€", min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, 9), min_size=1),
)
def test_stream_never_shows_part_of_the_stop_text_that_ends_it(text, stop, sizes):
    state = completion(stop=[stop])
    shown = feed(state, split(list(text.encode()), sizes))
    if state.finish_reason == "stop":
        assert shown == text[: text.index(stop)]
    else:
        assert text.startswith(shown)


@pytest.mark.parametrize("index", range(6))
def test_stream_shows_text_as_soon_as_it_is_certain(index):
    state = completion(stop=["xyz"])
    shown = feed(state, split(list(b"abcdef"), [1]))
    assert shown[index] == "abcdef"[index]
