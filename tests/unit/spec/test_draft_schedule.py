import itertools
import random

import pytest

from lean_laguna.spec.draft_schedule import StepCosts


def best_by_brute_force(costs, survival):
    rates = []
    for length in range(min(max(map(len, survival)), len(costs.verify_s) - 1) + 1):
        tokens = sum(1 + sum(chances[:length]) for chances in survival)
        rates.append(tokens / (costs.draft_s + costs.verify_s[length]))
    return max(range(len(rates)), key=lambda k: (rates[k], -k))


def random_case(seed):
    rng = random.Random(seed)
    longest, count = rng.randint(1, 8), rng.randint(1, 3)
    step = rng.random()
    costs = StepCosts(rng.random(), [1 + step * k * rng.random() for k in range(longest + 1)])
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
    best = costs.best_length(survival)
    for length in range(1, max(map(len, survival))):
        if not costs.may_pay([chances[:length] for chances in survival], length):
            assert best <= length


def test_verification_that_costs_the_same_at_any_length_verifies_all():
    assert StepCosts(1.0, [1.0] * 8).best_length([[0.5**k for k in range(1, 8)]]) == 7


def test_doubtful_drafts_at_a_price_are_not_sent():
    costs = StepCosts(0.1, [1.0, 1.5, 2.0, 2.5])
    assert costs.best_length([[0.1, 0.05, 0.01]]) == 0
    assert costs.best_length([[0.9, 0.85, 0.1]]) == 2
    assert costs.best_length([]) == 0
