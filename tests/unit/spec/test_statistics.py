import pytest

from lean_laguna.core.types import SpeculationStats
from lean_laguna.spec.statistics import SpeculationCounter


def test_counts_follow_vllms_definitions():
    counter = SpeculationCounter()
    for drafted, accepted in ((3, 3), (3, 0), (0, 0), (2, 1)):
        counter.record(drafted, accepted)
    stats = counter.stats()
    assert stats == SpeculationStats(3, 8, 4, (2, 1, 1), 4)
    assert stats.mean_acceptance_length == pytest.approx(1 + 4 / 3)
    assert stats.draft_acceptance_rate == pytest.approx(0.5)
    assert stats.draft_acceptance_rate_per_pos == pytest.approx((2 / 3, 1 / 3, 1 / 3))


def test_drafted_positions_that_never_stood_are_counted_as_zero():
    counter = SpeculationCounter()
    counter.record(4, 0)
    assert counter.stats().num_accepted_tokens_per_pos == (0, 0, 0, 0)


def test_nothing_drafted_is_absent_not_zero():
    counter = SpeculationCounter()
    counter.record(0, 0)
    stats = counter.stats()
    assert stats.num_steps == 1
    assert stats.mean_acceptance_length is None
    assert stats.draft_acceptance_rate is None
    assert stats.num_accepted_tokens_per_pos == ()


def test_counts_of_several_completions_add_up():
    first, second = SpeculationCounter(), SpeculationCounter()
    first.record(1, 1)
    second.record(3, 2)
    assert first.stats() + second.stats() == SpeculationStats(2, 4, 3, (2, 1, 0), 2)


def test_steps_with_drafts_are_remembered_where_asked_for_and_not_summed():
    counter = SpeculationCounter(keeps_steps=True)
    for drafted, accepted in ((3, 3), (0, 0), (2, 1)):
        counter.record(drafted, accepted)
    assert counter.stats().per_step == ((3, 3), (2, 1))
    assert (counter.stats() + counter.stats()).per_step == ()
