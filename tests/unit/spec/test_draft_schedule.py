import itertools
import random

import pytest

from lean_laguna.spec.draft_schedule import StepCosts, StepWorth


def best_by_brute_force(costs, survival):
    values = []
    for length in range(min(max(map(len, survival)), len(costs.verify_s) - 1) + 1):
        tokens = sum(sum(chances[:length]) for chances in survival)
        values.append(tokens - costs.tokens_per_s * costs.verify_s[length])
    return max(range(len(values)), key=lambda k: (values[k], -k))


def random_case(seed):
    rng = random.Random(seed)
    longest, count = rng.randint(1, 8), rng.randint(1, 3)
    step = rng.random()
    costs = StepCosts([1 + step * k * rng.random() for k in range(longest + 1)], 0.2 + rng.random())
    survival = []
    for _ in range(count):
        conditional = [rng.random() for _ in range(rng.randint(1, longest))]
        survival.append(list(itertools.accumulate(conditional, lambda a, b: a * b)))
    return costs, survival


@pytest.mark.parametrize("seed", range(50))
def test_the_best_length_is_that_of_a_search(seed):
    costs, survival = random_case(seed)
    assert costs.best_length(survival) == best_by_brute_force(costs, survival)


@pytest.mark.parametrize("seed", range(50))
def test_stopping_early_never_loses_the_best_length(seed):
    costs, survival = random_case(seed)
    best, worth = costs.best_length(survival), StepWorth(costs)
    for length in range(1, max(map(len, survival))):
        worth.add(sum(chances[length - 1] for chances in survival if len(chances) >= length))
        if not worth.may_grow:
            assert best <= length
            assert worth.best == best


def test_drafts_end_where_the_next_would_go_on_too_rarely():
    costs = StepCosts([1.0] * 8, 1.0, least=0.1)
    chances = [0.8, 0.6, 0.2, 0.1]
    assert costs.num_made([chances], 7) == 3, "0.2 * 0.2 / 0.6 is less than 0.1, 0.6 * 0.6 / 0.8 is not"
    assert costs.num_made([chances, [0.9] * 6], 5) == 5
    assert costs.num_made([[0.01, 0.01]], 7) == 1
    assert costs.num_made([[]], 7) == costs.num_made([], 7) == 0
    assert StepCosts([1.0] * 8, 1.0).num_made([chances], 7) == 4


def test_verification_that_costs_the_same_at_any_length_verifies_all():
    assert StepCosts([1.0] * 8, 2.0).best_length([[0.5**k for k in range(1, 8)]]) == 7


def test_doubtful_drafts_at_a_price_are_not_sent():
    costs = StepCosts([1.0, 1.5, 2.0, 2.5], 1.0)
    assert costs.best_length([[0.1, 0.05, 0.01]]) == 0
    assert costs.best_length([[0.9, 0.85, 0.1]]) == 2
    assert costs.best_length([]) == 0


def test_steps_scheduled_at_what_they_earn_beat_steps_at_their_own_best_rate_and_any_fixed_length():
    draw = random.Random(0)
    verify_s, draft_s = [1 + 0.25 * k for k in range(8)], 0.6
    steps = [[draw.random() ** (0.2 if i % 2 else 2.0)] * 7 for i in range(4000)]
    survival = [list(itertools.accumulate(chances, lambda a, b: a * b)) for chances in steps]

    def rate(lengths):
        tokens = sum(1 + sum(chances[:n]) for chances, n in zip(survival, lengths, strict=True))
        return tokens / sum(draft_s + verify_s[n] for n in lengths)

    def own_best(chances):
        return max(range(8), key=lambda n: (1 + sum(chances[:n])) / (draft_s + verify_s[n]))

    earned = 0.5
    for _ in range(4):
        costs = StepCosts(verify_s, earned)
        earned = rate([costs.best_length([chances]) for chances in survival])
    assert earned > 1.005 * rate([own_best(chances) for chances in survival])
    assert earned > 1.05 * max(rate([n] * len(steps)) for n in range(8))
