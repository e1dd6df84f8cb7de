"""Synthetic acceptance has the rates it was given, as marginals, and depends on seed and position alone."""

import pytest

from lean_laguna.spec.synthetic import SyntheticAcceptance

RATES = (0.9, 0.81, 0.73, 0.62, 0.52, 0.46, 0.4)


def test_the_share_of_blocks_with_the_first_i_drafts_standing_is_rate_i():
    synthetic = SyntheticAcceptance((RATES,))
    drafts, sampled = list(range(7)), list(range(100, 108))
    counts = [synthetic.accept(drafts, sampled, 7, at).num_accepted_tokens for at in range(4000)]
    for i, rate in enumerate(RATES):
        assert sum(n > i for n in counts) / len(counts) == pytest.approx(rate, abs=0.03)
    assert 1 + sum(counts) / len(counts) == pytest.approx(1 + sum(RATES), abs=0.12)


def test_accepted_drafts_go_out_as_drafted_and_the_targets_token_after_them():
    verdict = SyntheticAcceptance(((1.0, 1.0),)).accept([5, 6, 7], [50, 60, 70, 80], 3, 9)
    assert verdict.num_accepted_tokens == 2
    assert verdict.token_ids == [5, 6, 70]
    nothing = SyntheticAcceptance(((0.0,),)).accept([5], [50, 60], 3, 9)
    assert (nothing.num_accepted_tokens, nothing.token_ids) == (0, [50])


def test_the_same_block_is_judged_the_same():
    synthetic = SyntheticAcceptance((RATES,))
    verdicts = [synthetic.accept([1] * 7, [2] * 8, 2**64 - 1, at) for at in range(50)]
    assert verdicts == [synthetic.accept([1] * 7, [2] * 8, 2**64 - 1, at) for at in range(50)]
    assert len({v.num_accepted_tokens for v in verdicts}) > 3


def test_each_block_draws_one_of_several_sets():
    synthetic = SyntheticAcceptance(((1.0, 0.0), (1.0, 1.0), (0.0, 0.0)))
    counts = [synthetic.accept([5, 6], [7, 8, 9], 7, at).num_accepted_tokens for at in range(600)]
    assert {n: round(counts.count(n) / 600, 1) for n in range(3)} == {0: 0.3, 1: 0.3, 2: 0.3}


def steps_of(num_tokens):
    """Expected steps of a request of so many tokens: the last ones have no room for all drafts."""
    standing = (1.0, *RATES)
    expected = [0.0]
    for left in range(1, num_tokens + 1):
        most = min(len(RATES), left - 1)
        chances = [standing[n] - (standing[n + 1] if n < most else 0.0) for n in range(most + 1)]
        expected.append(1 + sum(chance * expected[left - 1 - n] for n, chance in enumerate(chances)))
    return expected[num_tokens]


def test_requests_take_the_steps_that_the_rates_say():
    synthetic = SyntheticAcceptance((RATES,))
    num_steps, num_requests, num_tokens = 0, 50, 512
    for seed in range(num_requests):
        done = 0
        while done < num_tokens:
            drafts = list(range(min(len(RATES), num_tokens - done - 1)))
            done += len(synthetic.accept(drafts, list(range(len(drafts) + 1)), seed, done).token_ids)
            num_steps += 1
    # 4,700 steps of 5.44 tokens, each off by 2.6: 0.7 % is one standard error.
    assert num_steps / num_requests == pytest.approx(steps_of(num_tokens), rel=0.025)
    assert num_tokens / steps_of(num_tokens) == pytest.approx(1 + sum(RATES), rel=0.01), "an end costs little"
    assert 32 / steps_of(32) < 0.95 * (1 + sum(RATES)), "but more in short requests"
