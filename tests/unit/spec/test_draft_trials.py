"""What choosing costs: machines and drafters on paper, beside the best fixed length in hindsight."""

import random
import statistics

import pytest

from lean_laguna.spec.draft_length import DraftLengthController
from lean_laguna.spec.draft_shape import StepShape
from lean_laguna.spec.draft_trials import Estimates, Policy, Trials
from support.machine import Machine, run

GREEDY = [0.94, 0.93, 0.92, 0.91, 0.9, 0.88, 0.86, *[0.84] * 8]
SAMPLED = [0.62, 0.62, 0.64, 0.65, 0.65, 0.64, 0.62, *[0.6] * 8]
POOR = [0.15] * 15
SEVEN = [0.9, 0.9, 0.9, 0.85, 0.84, 0.885, 0.87, *[0.0] * 8]  # by drafts of seven that all stand at 0.40

NARROW_MS = [0.0, 2.39, 2.7, 3.0, 3.3, 3.4, 3.6, 3.75, 3.9]
WIDE_MS = [0.0, 3.5, 4.1, 4.5, 4.8, 5.2, 5.4, 5.7, 5.9, 6.2, 6.25, 6.7, 6.7, 6.95, 7.1, 7.3, 7.6]


def cpu_draft(k, batch, context):
    return (k > 0) * 3e-3 * (1 + 0.05 * k * batch)


def cpu_verify(k, batch, context):
    rows = batch * (1 + k)
    tiled = rows if rows == 1 else next((t for t in (2, 4, 8, 12, 16) if t >= rows), -(-rows // 4) * 4)
    return 6.9e-3 * (1 + 0.068 * (tiled - 1))


def launches(k, batch):
    """Rows of the launches of sixteen rows that a GPU needs, and requests in each."""
    fitting = max(1, 16 // (1 + k))
    return [(1 + k) * min(fitting, batch - i) for i in range(0, batch, fitting)]


def gpu_draft(k, batch, context):
    return (k > 0) * 0.5e-3 * sum(1 + 0.03 * rows for rows in launches(k, batch))


def gpu_verify(k, batch, context):
    """As measured on an H200, and what each request's own context takes."""
    own = sum((NARROW_MS if rows <= 8 else WIDE_MS)[rows] for rows in launches(k, batch))
    return 1e-3 * (own + 0.25 * (batch - len(launches(k, batch))))


def plain_pays(k, batch, context):
    return 1e-3 + 2e-3 * (1 + k) * batch


def machine(draft_s, verify_s, rates):
    return Machine(draft_s, verify_s, lambda context: rates, jitter=0.05)


CPU, GPU = (cpu_draft, cpu_verify), (gpu_draft, gpu_verify)
# Largest mean loss beside the best fixed length over 64, 256 and 4,096 steps.
WORLDS = {
    "CPU, pays hugely": (CPU, GREEDY, 1, (0.06, 0.035, 0.02)),
    "CPU, pays": (CPU, SAMPLED, 1, (0.10, 0.05, 0.04)),  # seven, begun with, is 4 % slower than three
    "CPU, pays a little": ((lambda k, *_: (k > 0) * 6e-3, cpu_verify), SAMPLED, 1, (0.09, 0.09, 0.06)),
    "CPU, does not pay": (CPU, POOR, 1, (0.12, 0.05, 0.02)),
    "CPU, useless": (CPU, [0.01] * 15, 1, (0.12, 0.05, 0.02)),
    "CPU, rows cost in full": ((cpu_draft, plain_pays), [0.7] * 15, 1, (0.25, 0.12, 0.03)),
    "CPU, four streams": (CPU, GREEDY, 4, (0.06, 0.03, 0.02)),
    "CPU, sixteen streams, does not pay": (CPU, POOR, 16, (0.06, 0.03, 0.02)),
    "GPU": (GPU, SEVEN, 1, (0.04, 0.02, 0.01)),
    "GPU, two streams": (GPU, SEVEN, 2, (0.07, 0.03, 0.01)),
    "GPU, four streams": (GPU, SEVEN, 4, (0.05, 0.03, 0.02)),
    "GPU, eight streams": (GPU, SEVEN, 8, (0.05, 0.03, 0.02)),
    "GPU, sixteen streams": (GPU, SEVEN, 16, (0.05, 0.03, 0.02)),
    "GPU, sampled": (GPU, SAMPLED, 1, (0.06, 0.05, 0.02)),  # likewise
    "GPU, sixteen streams, does not pay": (GPU, POOR, 16, (0.06, 0.03, 0.02)),
}


def loss(paper, num_steps, batch, is_gpu, seed):
    """Tokens lost beside the best fixed length in the same time, by what each length brings on average."""
    controller = DraftLengthController(15)
    if is_gpu:
        controller.shape = StepShape(16, (8, 16))
    lengths = run(paper, controller, num_steps, batch=batch, late=2 * is_gpu, seed=seed).lengths
    step_s = {k: paper.draft_s(k, batch, 100) + paper.verify_s(k, batch, 100) for k in set(lengths)}
    seconds = sum(step_s[k] for k in lengths)
    tokens = sum(step_s[k] * paper.tokens_per_s(k, batch) for k in lengths)
    return 1 - tokens / (seconds * paper.tokens_per_s(paper.best(batch), batch))


@pytest.mark.parametrize("name", WORLDS)
def test_choosing_costs_little_from_the_first_step_on(name):
    times, rates, batch, bounds = WORLDS[name]
    paper = machine(*times, rates)
    for num_steps, num_runs, bound in zip((64, 256, 4096), (8, 4, 1), bounds, strict=True):
        found = [loss(paper, num_steps, batch, times is GPU, seed) for seed in range(num_runs)]
        assert statistics.mean(found) < bound, (num_steps, found)


@pytest.mark.parametrize(("before", "after"), [(GREEDY, POOR), (POOR, GREEDY)])
def test_a_change_of_text_midway_is_noticed(before, after):
    rates = list(before)
    paper = machine(*CPU, rates)
    controller = DraftLengthController(15)
    run(paper, controller, 512)
    rates[:] = after
    lengths = run(paper, controller, 512, seed=1).lengths
    best = paper.tokens_per_s(paper.best())
    assert statistics.mean(paper.tokens_per_s(k) for k in lengths) > 0.8 * best
    assert statistics.mean(paper.tokens_per_s(k) for k in lengths[256:]) > 0.95 * best


def test_drafting_that_once_seemed_dear_is_tried_again():
    controller, dear = DraftLengthController(7), [20.0]
    machine = Machine(
        lambda k, batch, context: dear[0] * 0.5 * (k > 0),
        lambda k, batch, context: 1 + (dear[0] * 0.5 if k else 0.0),
        lambda _: [0.05 if dear[0] > 1 else 0.95] * 7,
    )
    assert run(machine, controller, 100).lengths[-1] == 0
    dear[0] = 0.2
    assert run(machine, controller, 4000).lengths[-1] > 0


def test_a_machine_that_is_slower_now_and_then_is_no_reason_to_wander():
    slow = [1.0]
    paper = Machine(
        lambda *step: slow[0] * gpu_draft(*step), lambda *step: slow[0] * gpu_verify(*step), lambda _: SEVEN
    )
    controller = DraftLengthController(15)
    lengths = []
    for i in range(40):
        slow[0] = 1.4 if i % 2 else 1.0
        lengths += run(paper, controller, 50, seed=i).lengths
    assert sum(k in (6, 7) for k in lengths) > 0.93 * len(lengths)


# --- texts that differ, where lengths are about as good

CPU_DRAFT_MS = [0.04, 2.95, 3.3, 3.55, 3.9, 4.3, 4.55, 4.7, 4.73, 4.8, 4.85, 4.9, 4.95, 5.0, 5.05, 5.15]
CPU_VERIFY_MS = [5.0, 5.1, 6.0, 6.4, 7.4, 8.35, 9.2, 9.3, 10.8, 11.0, 11.0, 11.1, 12.0, 12.1, 12.3, 12.4]


def texts(rate, spread, seed, num=40, fixed=None):
    """Return tokens a second over texts of some 50 steps whose drafts stand at different rates."""
    draw, now = random.Random(seed), [0.9] * 15
    pace = [1.0]

    def slower(times):
        return lambda k, batch, context: 1e-3 * times[k] * pace[0]

    paper = Machine(slower(CPU_DRAFT_MS), slower(CPU_VERIFY_MS), lambda _: now, jitter=0.08)
    controller = DraftLengthController(15, "auto" if fixed is None else fixed)
    tokens = seconds = 0.0
    for text in range(num):
        now[:] = [min(0.99, max(0.02, draw.gauss(rate, spread)))] * 15
        pace[0] = draw.choice([1.0, 1.0, 1.15, 1.3])
        found = run(paper, controller, 50, seed=1000 * seed + text)
        tokens += found.tokens
        seconds += found.seconds
    return tokens / seconds


def test_a_good_length_is_kept_where_others_are_about_as_good():
    ratios = [texts(0.87, 0.04, seed) / texts(0.87, 0.04, seed, fixed=7) for seed in range(6)]
    assert statistics.mean(ratios) > 0.985, ratios
    assert min(ratios) > 0.965, ratios


def test_a_length_that_is_clearly_better_is_taken_up():
    ratios = [texts(0.5, 0.08, seed) / texts(0.5, 0.08, seed, fixed=7) for seed in range(6)]
    assert statistics.mean(ratios) > 1.1, ratios


def test_trials_take_a_hundredth_of_the_time():
    paper = machine(*CPU, GREEDY)
    controller = DraftLengthController(15)
    controller.choose(1, 100)
    lost_s = total_s = 0.0
    inner = Trials.observe

    def count(made, length, step_s, usual_s, worth_s, **more):
        nonlocal lost_s, total_s
        total_s += step_s * more["num_steps"]
        was_trial = inner(made, length, step_s, usual_s, worth_s, **more)
        lost_s += max(0.0, step_s - worth_s) if was_trial else 0.0
        return was_trial

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trials, "observe", count)
        run(paper, controller, 4000)
    assert lost_s < 0.01 * total_s + 2 * 2e-2


# --- the rules one by one

KNOWN = [1.0, 1.8, 2.4, 2.9], [1.0, 1.3, 1.4, 1.5]  # tokens and seconds; 3 is best


def estimates(tokens=KNOWN[0], counts=(9, 9, 9, 9), error=0.0, **doubts):
    """Return estimates of which some lengths (``_1``, ``_2``) are in doubt."""
    doubt = [doubts.get(f"_{k}", 0.0) for k in range(4)]
    return Estimates(tokens, KNOWN[1], counts, [error + own for own in doubt], doubt)


UNSEEN = estimates(_0=0.8, counts=(0, 9, 9, 9))  # plain steps


def trials(**policy):
    """Trials with two steps behind them."""
    made = Trials(Policy(**policy))
    for _ in range(2):
        made.observe(3, 1.5, 1.5, 1.5, is_off=False)
    return made


def test_what_cannot_be_better_is_not_tried():
    assert trials().choose(estimates(_1=0.15), 3) is None, "15 % less time will not do"
    assert trials().choose(estimates([1.0, 2.4, 2.4, 2.9], _1=0.15), 3) == 1
    assert trials().choose(UNSEEN, 3) is None, "far off"
    assert trials().choose(estimates([1.6, 1.8, 2.4, 2.9], _0=0.8), 3) == 0, "it could be much shorter"


def test_a_trial_must_tell_something():
    level = [1.0, 1.8, 2.7, 2.9]
    assert trials().choose(estimates(level, _2=0.05), 3) == 2
    assert trials().choose(estimates(level, _2=0.05, error=0.2), 3) is None, "acceptance is what is not known"


def test_trials_of_a_length_that_is_about_as_good_grow_rare():
    level, made, tried = [1.0, 1.8, 2.7, 2.9], trials(), []
    for step in range(200):
        k = made.choose(estimates(level, _2=0.05), 3)
        tried += [step] * (k == 2)
        made.observe(k or 3, 1.4 if k else 1.5, 1.5, 1.5, is_off=False)
    assert len(tried) < 14
    assert tried[-1] - tried[-2] >= 32
    assert made.choose(estimates([1.0, 1.8, 2.9, 2.9], _2=0.05), 3) == 2, "it seems 7 % better"


def test_a_gain_must_stand_out_from_what_chance_may_make_of_it():
    made = trials()
    made.home = 2
    made.observe(1, 1.3, 1.3, 1.3, is_off=False)
    made.observe(2, 1.4, 1.4, 1.4, is_off=False)
    assert made.least_gain(estimates(), 1) == pytest.approx(0.02, abs=1e-3)
    assert made.least_gain(estimates(_1=0.1), 1) == pytest.approx(0.185, abs=1e-2)
    assert made.least_gain(estimates(_2=0.1), 2) == pytest.approx(0.02, abs=1e-3), "begun with"
    assert made.least_gain(estimates(), 0) == float("inf"), "not seen of late"


def test_nothing_is_tried_before_there_is_time_for_it():
    close = estimates([1.6, 1.8, 2.4, 2.9], _0=0.8)
    assert trials(start_steps=0.0, explore_share=0.0).choose(close, 3) is None
    assert Trials(Policy()).choose(close, 3) is None, "the very first step"
    made = trials()
    assert made.choose(close, 3) == 0
    assert made.observe(0, 1.0, 1.0, 0.5, is_off=False), "it lost half a second"
    assert made.saved_s == pytest.approx(1.5 * 1.5 + 0.01 * 3.0 - 0.5)
    better = estimates([2.2, 1.8, 2.4, 2.9], _0=0.1)
    assert trials(start_steps=0.0, explore_share=0.0).choose(better, 3) == 0, "for nothing"


def test_a_step_that_stands_for_others_saves_for_all_of_them():
    one, many = trials(), trials()
    for _ in range(6):
        one.observe(3, 1.5, 1.5, 1.5, is_off=False)
    many.observe(3, 1.5, 1.5, 1.5, is_off=False, num_steps=6)
    assert many.saved_s == pytest.approx(one.saved_s)
    assert many.age(0) == one.age(0) == 8


def test_a_trial_is_awaited_but_not_for_ever():
    close = estimates([1.6, 1.8, 2.4, 2.9], _0=0.8)
    made = trials()
    made.choose(close, 3)
    assert all(made.is_waiting for _ in range(8))
    assert not made.observe(3, 1.5, 1.5, 1.5, is_off=False), "of a step launched before it"
    assert not made.is_waiting
    assert made.pending is None
    assert made.choose(close, 3) is None, "not at once again"


def test_while_off_drafting_is_tried_less_and_less_often_until_it_pays():
    known = Estimates([1.0, 1.1, 1.15], [1.0, 1.5, 1.6], [9, 9, 9])
    made = Trials(Policy())
    waits, last = [], 0
    for step in range(600):
        k = made.choose(known, 0)
        made.observe(k or 0, 1.5 if k else 1.0, 1.0, 1.0, is_off=True)
        if k:
            waits.append(step - last)
            last = step
    assert waits[-1] >= 64 > waits[0]
    while made.choose(known, 0) is None:
        made.observe(0, 1.0, 1.0, 1.0, is_off=True)
    made.observe(1, 1.2, 1.2, 2.0, is_off=True)
    assert made.choose(known, 0) == 1, "it paid, so once more"
