import random

import pytest
import torch

from lean_laguna.train.metrics import (
    accepted_lengths,
    chain_counts,
    conditional_accuracy,
    distinct_ngram_share,
    expected_acceptance_length,
    position_accuracy,
    run_lengths,
    tau_chain,
)


def walk_by_hand(draft, text, first, end, num_draft_tokens):
    """Greedy speculative decoding of ``text``, token by token; ``draft(a)`` is what follows position a."""
    emitted, cycles, accepted = [text[first]], 0, 0
    while len(emitted) < end - first:
        anchor = first + len(emitted) - 1
        left = end - first - len(emitted)
        proposal = draft(anchor)[: min(num_draft_tokens, left - 1)]
        count = 0
        while count < len(proposal) and proposal[count] == text[anchor + 1 + count]:
            count += 1
        emitted += text[anchor + 1 : anchor + 2 + count]
        if proposal:
            cycles, accepted = cycles + 1, accepted + count
    assert emitted == text[first:end]
    return cycles, accepted


def test_tau_chain_equals_a_walk_by_hand():
    rng = random.Random(0)
    for _ in range(50):
        drafts, length = rng.randint(1, 7), rng.randint(10, 40)
        text = [rng.randint(0, 1) for _ in range(length)]
        first = rng.randint(0, 5)
        table = [[rng.randint(0, 1) for _ in range(drafts)] for _ in range(length)]
        correct = torch.zeros(length, drafts, dtype=torch.bool)
        mask = torch.zeros_like(correct)
        for a in range(length):
            for k in range(drafts):
                if a + 1 + k < length:
                    mask[a, k], correct[a, k] = True, table[a][k] == text[a + 1 + k]
        accepted = accepted_lengths(correct, mask)
        expected = walk_by_hand(table.__getitem__, text, first, length, drafts)
        assert chain_counts(accepted.tolist(), first, length) == expected
        assert tau_chain(accepted[None], first, length) == pytest.approx(
            1 + expected[1] / max(1, expected[0])
        )


def test_accepted_length_stops_at_the_first_miss():
    correct = torch.tensor([[True, False, True], [True, True, True], [False, True, True]])
    assert accepted_lengths(correct).tolist() == [1, 3, 0]
    assert expected_acceptance_length(accepted_lengths(correct)) == pytest.approx(1 + 4 / 3)


def test_runs_are_counted_from_each_place_up_to_the_longest():
    match = torch.tensor([[True, True, True, False, True]])
    assert run_lengths(match, 2).tolist() == [[2, 2, 1, 0, 1]]
    assert run_lengths(match, 9).tolist() == [[3, 2, 1, 0, 1]]


def test_conditional_accuracy_counts_only_blocks_that_got_there():
    correct = torch.tensor([[True, False], [True, True], [False, True], [False, True]])
    mask = torch.ones_like(correct)
    assert position_accuracy(correct, mask) == pytest.approx([0.5, 0.75])
    assert conditional_accuracy(correct, mask) == pytest.approx([0.5, 0.5])


def test_uniform_average_overstates_the_chain():
    # Half the text in runs of 8 that are drafted whole, half that is never drafted right.
    accepted = torch.tensor([[7 - i % 8 if i < 64 else 0 for i in range(128)]])
    assert expected_acceptance_length(accepted[0]) > tau_chain(accepted, 0, 128)


def test_loops_have_a_low_distinct_share():
    assert distinct_ngram_share(torch.arange(64)[None]) == 1.0
    assert distinct_ngram_share(torch.zeros(1, 64, dtype=torch.int64)) == pytest.approx(1 / 57)
