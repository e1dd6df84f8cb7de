"""Scheduled steps on a simulated machine: drafts go as far as pays; a drafter wrong about itself is left."""

import itertools
import random

import pytest

from lean_laguna.spec.draft_costs import StepTimes
from lean_laguna.spec.draft_schedule import DraftSchedule
from lean_laguna.spec.scheduled_steps import ScheduledSteps, full_lengths

DRAFT_S, VERIFY_S = [0.0, *[0.4 + 0.02 * k for k in range(1, 16)]], [1 + 0.12 * k for k in range(16)]


def times():
    found = StepTimes()
    for k in range(16):
        found.add(k, DRAFT_S[k], VERIFY_S[k])
    return found


def simulate(steps, schedule, draw, *, num=800, said=None, best=1.2, length=3):
    """Return the caps used and tokens over time of the last half; ``said`` is what the drafter claims."""
    known, caps, tokens, seconds = times(), [], 0.0, 0.0
    for i in range(num):
        cap = steps.choose(schedule, known, 1, length, best, 15)
        caps.append(cap)
        chance = draw.random() ** (0.15 if draw.random() < 0.5 else 3)
        chances = list(itertools.accumulate([chance] * cap, lambda a, b: a * b))
        claimed = chances if said is None else [said] * cap
        sent = length if schedule.costs is None else schedule.costs.best_length([claimed])
        accepted = next((k for k in range(sent) if draw.random() > chance), sent)
        schedule.survival = [claimed]
        made = None if schedule.costs is None else cap
        steps.observe(schedule, known, (sent, made, length), DRAFT_S[cap], [(sent, accepted)])
        if i > num // 2:
            tokens += 1 + accepted
            seconds += DRAFT_S[cap] + VERIFY_S[sent]
    return caps, tokens / seconds


def test_promising_steps_draft_further_than_the_best_fixed_length():
    schedule = DraftSchedule()
    caps, rate = simulate(ScheduledSteps(), schedule, random.Random(1), best=1.0, length=7)
    assert max(set(caps), key=caps.count) >= 7
    assert rate > 1.05 * 1.0
    fixed = DraftSchedule(row_tiles=(8, 16))
    assert set(simulate(ScheduledSteps(), fixed, random.Random(1), length=7)[0]) == {7}


def test_a_drafter_that_is_wrong_about_itself_is_not_followed_for_long():
    steps, schedule = ScheduledSteps(), DraftSchedule()
    caps, _ = simulate(steps, schedule, random.Random(2), said=1.0, best=1.6)
    assert caps.count(3) > 400


def test_a_step_that_teaches_nothing_costs_no_plan(monkeypatch):
    steps, schedule, known, asked = ScheduledSteps(), DraftSchedule(), times(), []
    ascending = StepTimes.ascending
    monkeypatch.setattr(StepTimes, "ascending", lambda self, k: (asked.append(k), ascending(self, k))[1])
    for _ in range(100):
        assert steps.choose(schedule, known, 1, 7, 2.0, 15) == 7
    assert asked == []
    schedule.survival = [[0.9] * 7]
    steps.observe(schedule, known, (7, None, 7), DRAFT_S[7], [(7, 6)])
    assert asked == [15]


def fixed_after(steps, schedule, *, chances, draft_s=None, num=200, verify_s=VERIFY_S):
    """Return how many of the last steps were scheduled; all blocks are alike, and true to their chances."""
    known, draw, scheduled = StepTimes(), random.Random(3), 0
    for k in range(16):
        known.add(k, DRAFT_S[k], verify_s[k])
    for i in range(num):
        cap = steps.choose(schedule, known, 1, 7, 2.0, 15)
        is_scheduled = schedule.costs is not None
        survival = list(itertools.accumulate([chances(draw)] * cap, lambda a, b: a * b))
        sent = schedule.costs.best_length([survival]) if is_scheduled else cap
        chance = survival[0]
        accepted = next((k for k in range(sent) if draw.random() > chance), sent)
        schedule.survival = [survival]
        took = draft_s if draft_s is not None and is_scheduled else DRAFT_S[cap]
        steps.observe(schedule, known, (sent, cap if is_scheduled else None, 7), took, [(sent, accepted)])
        scheduled += is_scheduled and i >= num // 2
    return scheduled


def test_where_all_drafts_are_worth_sending_nothing_is_gained():
    steps, schedule = ScheduledSteps(), DraftSchedule(row_tiles=(8, 16))
    fixed_after(steps, schedule, chances=lambda _: 0.97)
    assert steps.gain == pytest.approx(1.0, abs=1e-6)


def test_a_schedule_that_takes_longer_than_it_saves_is_left():
    dear, schedule = 3.0, DraftSchedule(row_tiles=(8, 16))
    mixed = lambda draw: draw.choice([0.2, 0.99])  # noqa: E731
    assert fixed_after(ScheduledSteps(), schedule, chances=mixed, draft_s=dear) < 10
    assert fixed_after(ScheduledSteps(), schedule, chances=mixed) > 60


def test_text_that_turns_mixed_is_scheduled():
    steps, schedule = ScheduledSteps(), DraftSchedule(row_tiles=(8, 16))
    dear = [1 + 0.001 * k for k in range(16)]
    fixed_after(steps, schedule, chances=lambda _: 0.9, verify_s=dear)
    assert steps.gain == pytest.approx(1.0, abs=1e-3)
    assert fixed_after(steps, schedule, chances=lambda draw: draw.choice([0.2, 0.99]), num=800) > 300
    assert steps.gain > 1.02


def test_drafts_that_stop_early_are_counted_as_the_time_that_they_save():
    flat = [1.0] * 16
    mixed = lambda draw: draw.choice([0.2, 0.99])  # noqa: E731
    plain, stopping = DraftSchedule(row_tiles=(8, 16)), DraftSchedule(row_tiles=(8, 16), stops_early=True)
    assert fixed_after(ScheduledSteps(), plain, chances=mixed, verify_s=flat) == 0
    steps = ScheduledSteps()
    fixed_after(steps, stopping, chances=mixed, verify_s=flat, num=8)
    assert steps.is_on
    assert 1.01 < steps.gain < 1.04, "of half the steps, four or five drafts at 0.02 of 1.54 each"
    steps.choose(stopping, times(), 1, 7, 2.0, 15)
    assert stopping.costs.least == pytest.approx(stopping.costs.tokens_per_s * (0.02 + 0.12))


@pytest.mark.parametrize(
    ("tiles", "batch", "expected"),
    [((2, 4, 8, 12, 16), 1, [1, 3, 7, 11, 15]), ((8, 16), 1, [7, 15]), ((8, 16), 2, [3, 7, 15])],
)
def test_lengths_that_fill_tiles(tiles, batch, expected):
    assert full_lengths(tiles, batch, 15) == expected


def test_little_is_gained_for_sure():
    steps, schedule = ScheduledSteps(), DraftSchedule()
    known, draw, on = times(), random.Random(5), []
    for _ in range(600):
        cap = steps.choose(schedule, known, 1, 7, 1.25, 7)
        chance = draw.choice([0.5, 0.6, 0.97])
        survival = list(itertools.accumulate([chance] * cap, lambda a, b: a * b))
        costs = schedule.costs
        sent = cap if costs is None else costs.best_length([survival])
        accepted = next((k for k in range(sent) if draw.random() > chance), sent)
        schedule.survival = [survival]
        steps.observe(
            schedule, known, (sent, None if costs is None else cap, 7), DRAFT_S[cap], [(sent, accepted)]
        )
        on.append(costs is not None)
    assert sum(on[100:]) > 0.95 * len(on[100:]), "less came than was claimed, as chance has it"


def test_time_is_worth_what_scheduled_steps_earn():
    """Not what was expected of the fixed length: that may be far off."""
    steps, schedule, known, draw = ScheduledSteps(), DraftSchedule(), times(), random.Random(6)
    earned = []
    for expected in (0.3, 3.0):
        for _ in range(300):
            cap = steps.choose(schedule, known, 1, 7, expected, 7)
            chance = draw.choice([0.3, 0.97])
            survival = list(itertools.accumulate([chance] * cap, lambda a, b: a * b))
            costs = schedule.costs
            sent = cap if costs is None else costs.best_length([survival])
            accepted = next((k for k in range(sent) if draw.random() > chance), sent)
            schedule.survival = [survival]
            made = None if costs is None else cap
            steps.observe(schedule, known, (sent, made, 7), DRAFT_S[cap], [(sent, accepted)])
        earned.append(schedule.costs.tokens_per_s)
    fixed = (1 + (sum(0.97**k for k in range(1, 8)) + 0.43) / 2) / (DRAFT_S[7] + VERIFY_S[7])
    assert earned == pytest.approx([0.85 * 1.1 * fixed] * 2, rel=0.12)
