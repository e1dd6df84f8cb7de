import pytest

from lean_laguna.spec.acceptance import Cut, Ending, accept, cut_block


@pytest.mark.parametrize(
    ("drafts", "sampled", "num_accepted", "emitted"),
    [
        ([], [9], 0, [9]),
        ([1], [1, 2], 1, [1, 2]),
        ([1], [2, 3], 0, [2]),
        ([1, 2, 3], [1, 2, 3, 4], 3, [1, 2, 3, 4]),
        ([1, 9, 3], [1, 2, 3, 4], 1, [1, 2]),
        ([-1], [-1, 2], 0, [-1]),
        ([1, -1, 3], [1, 2, 3, 4], 1, [1, 2]),
    ],
)
def test_drafts_stand_while_they_equal_the_targets_tokens(drafts, sampled, num_accepted, emitted):
    accepted = accept(drafts, sampled)
    assert accepted.num_accepted_tokens == num_accepted
    assert accepted.token_ids == emitted


ENDING = Ending(max_tokens=10, min_tokens=0, eos_token_ids={3}, stop_token_ids=[4, 5])


@pytest.mark.parametrize(
    ("tokens", "before", "expected"),
    [
        ([1, 2], 0, Cut(2)),
        ([1, 3, 2], 0, Cut(2, "stop")),
        ([3], 0, Cut(1, "stop")),
        ([1, 2, 4, 3], 0, Cut(3, "stop", 4)),
        ([1, 3, 4], 0, Cut(2, "stop")),
        ([1, 2, 1, 3], 7, Cut(3, "length")),
        ([1, 3, 1, 1], 7, Cut(2, "stop")),
        ([1, 2, 3], 7, Cut(3, "stop")),
        ([1, 2, 5], 7, Cut(3, "stop", 5)),
        ([1] * 20, 0, Cut(10, "length")),
    ],
)
def test_the_earliest_event_wins_and_a_stop_goes_before_the_limit(tokens, before, expected):
    assert cut_block(tokens, before, ENDING) == expected


def test_a_token_that_is_end_of_sequence_and_stop_token_counts_as_end_of_sequence():
    assert cut_block([3], 0, Ending(max_tokens=9, eos_token_ids=(3,), stop_token_ids=(3,))) == Cut(
        1, "stop", None
    )
    assert cut_block([3], 0, Ending(max_tokens=9, stop_token_ids=(3,))) == Cut(1, "stop", 3)


def test_nothing_but_the_limit_ends_a_completion_before_min_tokens():
    ending = Ending(max_tokens=4, min_tokens=3, eos_token_ids=(3,), stop_token_ids=(4,))
    assert cut_block([3, 4, 3, 3], 0, ending, lambda token: "x") == Cut(4, "stop")
    assert cut_block([1, 1, 1, 1, 1], 0, ending) == Cut(4, "length")


def stop_text_watcher(text_of, stop):
    said = []

    def watch(token):
        said.append(text_of[token])
        return stop if stop in "".join(said) else None

    return watch, said


def test_a_stop_text_is_looked_for_token_by_token():
    watch, said = stop_text_watcher({1: "a", 2: "b\n", 6: "c"}, "b")
    assert cut_block([1, 2, 6, 3], 0, ENDING, watch) == Cut(2, "stop", "b")
    assert said == ["a", "b\n"]


def test_a_stop_text_goes_before_the_limit_and_a_stop_token_is_not_text():
    watch, said = stop_text_watcher({1: "a", 2: "b"}, "b")
    assert cut_block([1, 2], 8, ENDING, watch) == Cut(2, "stop", "b")
    watch, said = stop_text_watcher({1: "a", 3: "b"}, "b")
    assert cut_block([1, 3], 0, ENDING, watch) == Cut(2, "stop")
    assert said == ["a"]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 20])
def test_cutting_does_not_depend_on_how_tokens_are_grouped(size):
    tokens = [1, 2, 3, 1, 4, 1, 1, 3, 1, 1, 1, 1, 5, 1]
    for ending in (
        ENDING,
        Ending(6, 3, {3}, {4}),
        Ending(5, 5, {3}, {4}),
        Ending(99, 0, (), {5}),
        Ending(99),
    ):
        kept, cut = 0, Cut(0)
        for start in range(0, len(tokens), size):
            cut = cut_block(tokens[start : start + size], start, ending)
            kept += cut.num_kept
            if cut.finish_reason:
                break
        whole = cut_block(tokens, 0, ending)
        assert (kept, cut.finish_reason, cut.stop_reason) == (
            whole.num_kept,
            whole.finish_reason,
            whole.stop_reason,
        )
