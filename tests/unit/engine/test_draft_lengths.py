import pytest

from lean_laguna.core.types import SamplingParams
from lean_laguna.engine.draft_lengths import DraftLengths
from support.engines import PROPOSERS, make_engine, tokens_of


class Controller:
    """Always says 6, and notes what it is told."""

    def __init__(self):
        self.asked, self.told = [], []

    def choose(self, batch, context_len):
        self.asked.append((batch, context_len))
        return 6

    def observe(self, num_draft_tokens, batch, context_len, **measured):
        self.told.append((num_draft_tokens, batch, context_len, measured["accepted"]))

    def explain(self):
        return "six"


def run(requests, drafter="never", num_steps=1000):
    engine = make_engine(PROPOSERS[drafter]({0: [50] * 40, 1: [51] * 40}), 15)
    controller = Controller()
    engine._draft_lengths = DraftLengths(controller)
    for seed, (num_prompt, max_tokens, wanted) in enumerate(requests):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, seed=seed)
        engine.add_request(tokens_of(seed, num_prompt), params, num_speculative_tokens=wanted)
    for _ in range(num_steps):
        if engine.has_unfinished:
            engine.step()
    return engine, controller


def test_controller_hears_batch_and_longest_context():
    _, controller = run([(7, 30, None), (8, 30, None)], num_steps=4)
    assert controller.asked == [(1, 7), (2, 8), (2, 9)]


def test_step_that_also_prefills_teaches_nothing():
    _, controller = run([(7, 30, None), (8, 30, None)], num_steps=4)
    # The second step prefills the second prompt while the first sequence decodes.
    assert [told[:3] for told in controller.told] == [(6, 2, 8), (6, 2, 9)]
    assert controller.told[0][3] == [(6, 0), (6, 0)]


def test_requests_with_their_own_length_are_left_out():
    _, controller = run([(3, 30, None), (4, 30, 2)], num_steps=5)
    assert {batch for batch, _ in controller.asked} == {1}
    assert controller.told == []


def test_length_is_cut_to_what_can_be_emitted():
    engine, _ = run([(3, 8, None)])
    assert engine.proposer.asked == [6, 5, 4, 3, 2, 1]


@pytest.mark.parametrize("wanted", [0, 2, 15])
def test_request_decides_for_itself(wanted):
    engine, _ = run([(3, 20, wanted)], num_steps=3)
    assert engine.proposer.asked == ([wanted] * 2 if wanted else [])


def test_reason_is_the_controllers():
    engine, _ = run([(3, 8, None)])
    assert engine.stats().draft_length_reason == "six"
    assert DraftLengths(None).explain() is None
    assert DraftLengths(None).choose([object(), object()]) == [0, 0]
