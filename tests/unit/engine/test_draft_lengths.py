import random

import pytest

from lean_laguna.core.types import SamplingParams
from lean_laguna.engine.draft_lengths import DraftLengths, SpareTime
from lean_laguna.spec.draft_schedule import StepCosts
from support.engines import PROPOSERS, make_engine, tokens_of


class Controller:
    """Always says 6, and notes what it is told."""

    schedule, is_fixed = None, False

    def __init__(self):
        self.asked, self.told = [], []

    def choose(self, batch, context_len, *, may_schedule):
        self.asked.append((batch, context_len))
        return 6

    def hears(self, num_draft_tokens, batch, context_len, *, is_idle):
        return True

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


class Scheduling(Controller):
    """Knows what a step costs, and shares it with a drafter that says how confident it is."""

    max_draft_tokens = 15

    def __init__(self, schedule, costs):
        super().__init__()
        self.schedule, self.costs = schedule, costs
        self.unsent = []

    def choose(self, batch, context_len, *, may_schedule):
        self.schedule.costs = self.costs if may_schedule else None
        return super().choose(batch, context_len, may_schedule=may_schedule)

    def observe(self, num_draft_tokens, batch, context_len, **measured):
        super().observe(num_draft_tokens, batch, context_len, **measured)
        self.unsent.append(measured["unsent"])


@pytest.mark.parametrize("slope", [0.0, 1.0])
def test_a_confident_drafter_walks_further_and_sends_what_pays(slope):
    proposer = PROPOSERS["dspark"]({})
    engine = make_engine(proposer)
    costs = StepCosts([1 + slope * k for k in range(16)], 0.95)
    controller = Scheduling(proposer.schedule, costs)
    engine._draft_lengths.controller = controller
    state = engine.add_request(tokens_of(0, 9), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    while engine.has_unfinished:
        engine.step()
    sent = [told[0] for told in controller.told]
    counts = state.snapshot().outputs[0].speculation
    # All where they cost nothing; a few where they cost much.
    assert max(sent) == 6 if slope == 0 else max(sent) <= 3
    assert counts.num_cut_draft_tokens == proposer.schedule.num_cut_draft_tokens
    assert engine.stats().speculation.num_cut_draft_tokens == counts.num_cut_draft_tokens
    assert (counts.num_cut_draft_tokens > 0) == (slope > 0)
    assert sum(len(unsent[0]) for unsent in controller.unsent if unsent) == counts.num_cut_draft_tokens


@pytest.mark.parametrize(("num_accepted", "is_said"), [(0, True), (1, False)])
def test_a_drafter_that_does_not_belong_to_its_target_is_told_once(num_accepted, is_said, capsys):
    lengths = DraftLengths(None)
    for _ in range(100):
        lengths.observe([], [(7, 0), (7, num_accepted)], draft_s=0.0, verify_s=0.0)
    said = capsys.readouterr().err
    assert said.count("does not seem to belong to this target") == is_said
    assert not is_said or "tokenizer" in said


def test_plain_steps_say_nothing_about_a_drafter(capsys):
    lengths = DraftLengths(None)
    for _ in range(300):
        lengths.observe([], [(0, 0)], draft_s=0.0, verify_s=0.0)
    assert not capsys.readouterr().err


def test_a_step_launched_ahead_may_speak_for_fewer_sequences_than_were_chosen_for():
    engine, controller = run([(7, 30, None), (8, 30, None)], num_steps=4)
    first, second = engine.scheduler.running
    lengths = DraftLengths(controller)
    assert lengths.choose([first, second]) == [6, 6]
    lengths.observe([second], [(6, 2)], draft_s=1.0, verify_s=1.0)
    assert controller.told[-1][:2] == (6, 1)
    lengths.observe([second], [(7, 2)], draft_s=1.0, verify_s=1.0)
    assert controller.told[-1][3] == [(6, 2)]
    lengths.observe([second], [(7, 2)], draft_s=1.0, verify_s=1.0, are_earlier=True)
    assert controller.told[-1][3] == [(7, 2)], "more were chosen then"


@pytest.mark.parametrize(("wait_us", "every"), [(0, 64), (20, 40), (100, 8), (200, 4), (3000, 1)])
def test_a_sixteenth_of_the_time_that_the_host_waits_is_for_learning(wait_us, every):
    spare = SpareTime(50e-6)
    told = [spare.is_enough(wait_us * 1e-6) for _ in range(640)][320:]
    assert sum(told) == pytest.approx(320 / every, abs=1)


def test_lessons_are_as_rare_as_they_are_long():
    spare, told = SpareTime(50e-6), []
    for i in range(2000):
        told.append(spare.is_enough(200e-6))
        spare.learned(1.0 if i % 400 == 0 else 100e-6)
    assert sum(told[1200:]) == pytest.approx(800 / 8, abs=3)


def test_after_a_layout_there_is_no_time_until_launches_run_ahead():
    spare = SpareTime(50e-6)
    for _ in range(200):
        spare.is_enough(150e-6)
    for _ in range(3):
        spare.restart()
        assert [spare.is_enough(150e-6) for _ in range(5)].index(True) == 4


def test_a_long_wait_of_its_own_lets_no_step_teach():
    """Steps whose many drafts go well are waited for longest; who learns from them expects too much."""
    spare, told, draw = SpareTime(50e-6), [], random.Random(0)
    for _ in range(4000):
        is_long = draw.random() < 1 / 7
        told.append((spare.is_enough(400e-6 if is_long else 50e-6), is_long))
    long_ones = [is_long for is_heard, is_long in told if is_heard]
    assert sum(long_ones) / len(long_ones) == pytest.approx(1 / 7, abs=0.05)
