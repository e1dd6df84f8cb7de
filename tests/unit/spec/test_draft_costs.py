import math
import random
import statistics

import pytest

from lean_laguna.spec.draft_costs import AcceptanceRates, StepTimes


def per_row(k):
    """A shape: drafting is half a plain pass, and each draft adds a tenth."""
    return (0.5 if k else 0.0), 1 + 0.1 * k


def times(shape=per_row, **measured):
    made = StepTimes(shape)
    for name, (draft_s, verify_s) in measured.items():
        made.add(int(name[1:]), draft_s, verify_s)
    return made


def test_a_measured_length_is_its_median():
    made = StepTimes()
    for verify_s in (1.0, 99.0, 2.0, 3.0, 2.5):
        made.add(3, 0.5, verify_s)
    assert made.estimate(3) == (0.5, 2.5)
    assert made.count(3) == 5
    assert made.count(4) == 0


def test_old_observations_fade():
    made = StepTimes()
    for _ in range(100):
        made.add(3, 1.0, 1.0)
    for _ in range(200):
        made.add(3, 2.0, 2.0)
    assert made.estimate(3) == pytest.approx((2.0, 2.0), rel=0.05)


def test_a_slow_spell_of_the_machine_does_not_make_a_length_look_slow():
    made = StepTimes()
    for _ in range(20):
        made.add(7, 1.0, 3.0)
    for i in range(20):
        made.add(7 if i else 3, 1.5, 4.5 if i else 3.0)
    made.add(3, 1.5, 3.0)
    made.add(3, 1.5, 3.0)
    assert made.estimate(3) == pytest.approx((1.0, 2.0), rel=0.2), "half as long again, as all steps then"
    assert made.pace > 1.3


def test_the_first_slow_step_of_a_kind_does_not_count():
    assert times(k3=(9.0, 9.0)).estimate(3) == (9.0, 9.0)
    made = times(k3=(9.0, 9.0))
    made.add(3, 1.0, 2.0)
    assert made.estimate(3) == (1.0, 2.0)


def test_the_spread_says_how_far_one_observation_is_off():
    made, draw = StepTimes(), random.Random(1)
    assert made.spread(3) == 0.0
    for _ in range(15):
        made.add(3, 0.0, draw.gauss(1.0, 0.1))
    assert 0.05 < made.spread(3) < 0.2
    assert times(k3=(1.0, 1.0)).spread(3) == 0.0, "one tells nothing"


def test_between_measured_lengths_time_goes_as_the_shape_does():
    measured = {"k0": (0.0, 1.0), "k4": (0.4, 3.0), "k8": (0.8, 4.0)}
    assert times(**measured).estimate(2) == pytest.approx((0.4, 2.0)), "drafting costs what it costs"
    assert times(**measured).estimate(6) == pytest.approx((0.6, 3.5))
    tiled = times(lambda k: (0.5, 1.0 if k < 4 else 2.0), **measured)
    assert [tiled.estimate(k)[1] for k in (1, 3, 4)] == [1.0, 1.0, 3.0]
    flat = times(lambda k: (0.5, 1.0), **measured)
    assert flat.estimate(2)[1] == pytest.approx(2.0)


def test_beyond_what_was_measured_the_shape_is_scaled():
    assert times(k4=(0.7, 2.8)).estimate(0) == (0.0, pytest.approx(2.0))
    assert times(k4=(0.7, 2.8)).estimate(10) == pytest.approx((0.7, 4.0))
    assert times(k0=(0.0, 2.0)).estimate(4) == pytest.approx((1.0, 2.8)), "no draft was timed yet"


def test_what_another_length_takes_tells_of_one_by_the_shape():
    made = times(_4=(0.6, 2.8), _6=(0.5, 9.0))
    assert made.likely(6, 4) == (pytest.approx(0.6), pytest.approx(2.8 * 1.6 / 1.4))
    assert made.likely(6, 5) == made.likely(6, None) == made.estimate(6) == (0.5, 9.0)


def test_a_length_seen_long_ago_is_soon_known_anew():
    made = StepTimes()
    for _ in range(15):
        made.add(3, 0.0, 9.0)
    made.forget(3)
    made.forget(5)
    assert made.estimate(3) == (0.0, 9.0), "until it is seen"
    for _ in range(3):
        made.add(3, 0.0, 2.0)
    assert made.estimate(3) == (0.0, 2.0)


def test_before_anything_was_measured_the_shape_stands():
    other = times(k0=(0.0, 1.0), k7=(0.5, 1.5), k15=(0.5, 3.0))
    fresh = StepTimes(other.estimate)
    assert fresh.estimate(7) == (0.5, 1.5)
    fresh.add(7, 1.0, 3.0)
    assert fresh.estimate(7) == (1.0, 3.0)
    assert fresh.estimate(15) == pytest.approx((1.0, 6.0))
    assert fresh.estimate(0) == pytest.approx((0.0, 2.0))


def test_times_survive_a_round_trip():
    made = times(k0=(0.0, 1.0), k7=(0.5, 1.5))
    assert StepTimes.from_dict(made.to_dict()).to_dict() == made.to_dict()
    assert StepTimes().is_empty


def test_acceptance_of_a_position_is_conditional_on_the_ones_before():
    rates = AcceptanceRates(3)
    for _ in range(400):
        rates.add(3, 3)
        rates.add(3, 1)
    expected = rates.tokens_per_step()
    # Accepted at 1: always; at 2: half of the time; at 3: whenever 2 was.
    assert expected == pytest.approx([1, 2, 2.5, 3.0], abs=0.12)


def test_positions_that_were_never_tried_follow_the_one_before():
    rates = AcceptanceRates(5)
    for _ in range(400):
        rates.add(2, 2)
    assert rates.tokens_per_step()[5] == pytest.approx(6, abs=0.3)
    rates = AcceptanceRates(5)
    for _ in range(400):
        rates.add(1, 0)
    assert rates.tokens_per_step()[5] == pytest.approx(1, abs=0.1)


def test_a_step_without_drafts_says_nothing_about_acceptance():
    rates = AcceptanceRates(4)
    before = rates.tokens_per_step()
    rates.add(0, 0)
    assert rates.tokens_per_step() == before


def test_a_copy_goes_its_own_way():
    rates = AcceptanceRates(2)
    rates.add(2, 2)
    twin = rates.copy()
    twin.add(2, 0)
    assert rates.to_dict() != twin.to_dict()
    assert AcceptanceRates.from_dict(rates.to_dict(), 2).tokens_per_step() == rates.tokens_per_step()


def steps_until(rates, num_accepted, reached):
    for step in range(1, 200):
        rates.add(7, num_accepted)
        if reached(rates.tokens_per_step()[7]):
            return step
    raise AssertionError


def test_a_change_of_text_is_believed_within_a_few_steps():
    rates = AcceptanceRates(7)
    for _ in range(200):
        rates.add(7, 6)
    assert rates.tokens_per_step()[7] > 5
    assert steps_until(rates, 0, lambda tokens: tokens < 2) < 25
    for _ in range(200):
        rates.add(7, 0)
    assert steps_until(rates, 7, lambda tokens: tokens > 5) < 25


def test_a_position_that_is_no_longer_reached_does_not_live_on_old_evidence():
    rates = AcceptanceRates(7)
    for _ in range(200):
        rates.add(7, 7)
    for _ in range(40):
        rates.add(7, 0)
        rates.add(7, 0)
        rates.add(7, 1)
    assert rates.tokens_per_step()[7] == pytest.approx(1 + 1 / 3, abs=0.1)


def test_the_error_of_a_gain_is_about_how_far_it_is_off():
    def gain(rates):
        tokens = rates.tokens_per_step()
        return math.log(tokens[5] / tokens[2])

    draw, found, told = random.Random(5), [], []
    for _ in range(60):
        rates = AcceptanceRates(5)
        for _ in range(80):
            rates.add(5, next((k for k in range(5) if draw.random() > 0.7), 5))
        found.append(gain(rates))
        told.append(rates.gain_variances(2)[0][5] ** 0.5)
    spread = statistics.pstdev(found)
    assert spread < statistics.mean(told) < 2 * spread, "texts are more alike than these"
    in_all, beyond = rates.gain_variances(2)
    assert rates.gain_variances(5)[0][2] == pytest.approx(in_all[5])
    assert in_all[2] == beyond[2] == beyond[1] == 0.0
    assert 0 < beyond[5] < in_all[5]


def test_what_was_never_drafted_is_in_doubt():
    rates = AcceptanceRates(5)
    for _ in range(50):
        rates.add(2, 2)
        rates.add(2, 1)
    in_all, beyond = rates.gain_variances(2)
    assert beyond[5] > 9 * in_all[1]
