import itertools

from lean_laguna.spec.draft_caps import DraftCaps, full_lengths
from lean_laguna.spec.draft_schedule import StepCosts

CAPS = full_lengths((2, 4, 8, 12, 16), 1, 15)


def learned(chance, draft_s, tokens_per_s, made=15):
    caps = DraftCaps()
    survival = [list(itertools.accumulate([chance] * made, lambda a, b: a * b))]
    costs = StepCosts([1 + 0.1 * k for k in range(16)], tokens_per_s)
    for _ in range(20):
        caps.observe(CAPS, made, survival, costs, draft_s)
    return caps


def test_steps_that_drafted_far_tell_what_less_would_have_earned():
    dear = [0.1 * k for k in range(16)]
    cheap = [0.5] * 16
    assert learned(0.3, dear, 1.0).choose(CAPS, 7) <= 3
    assert learned(0.95, cheap, 2.0).choose(CAPS, 7) == 15


def test_longer_drafts_are_tried_once_and_then_now_and_then():
    caps = learned(0.9, [0.5] * 16, 2.0, made=7)
    assert caps.choose(CAPS, 7) == 11
    assert DraftCaps().choose(CAPS, 5) == 7
    poor = learned(0.3, [0.1 * k for k in range(16)], 1.0)
    assert len({poor.choose(CAPS, 7) for _ in range(50)}) == 1


def test_lengths_leave_no_row_of_a_tile_unused():
    assert CAPS == [1, 3, 7, 11, 15]
    for batch in (1, 2, 3, 4, 8):
        for length in full_lengths((8, 16), batch, 15)[:-1]:
            share = 16 // (1 + length)
            assert batch * (1 + length) <= 8 or (share + 1) * (1 + length) > 16
