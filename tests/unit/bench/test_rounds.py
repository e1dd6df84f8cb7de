import pytest

from lean_laguna.bench.rounds import Plan, run_rounds
from lean_laguna.core.types import SamplingParams
from lean_laguna.tasks.prompts import Prompt, PromptSet
from support.backends import ScriptedBackend

PROMPTS = PromptSet("set", tuple(Prompt(name, "easy", name) for name in "pqr"))


def run(num_sides, **plan):
    log = []
    sides = {name: ScriptedBackend(lambda *_: [1, 2, 3], log=log, name=name) for name in "ABC"[:num_sides]}
    rounds = run_rounds(sides, Plan(PROMPTS, SamplingParams(temperature=0), **plan))
    return rounds, log, sides


def test_two_sides_alternate_a_b_b_a_and_the_next_repeat_turns_round():
    _, log, _ = run(2, repeats=2, warmup=0)
    first = ["A:p", "B:p", "B:q", "A:q", "A:r", "B:r"]
    second = ["B:p", "A:p", "A:q", "B:q", "B:r", "A:r"]
    assert log == first + second


def test_many_sides_go_up_and_down():
    _, log, _ = run(3, repeats=1, warmup=0)
    assert [entry[0] for entry in log] == list("ABCCBAABC")


def test_every_side_has_every_prompt_in_every_repeat_in_order():
    rounds, _, sides = run(2, repeats=3, warmup=2)
    for name, backend in sides.items():
        assert [len(one) for one in rounds.passes(name)] == [3, 3, 3]
        assert len(backend.calls) == 2 + 9


def test_warm_up_comes_first_on_each_side_and_is_not_measured():
    _, log, _ = run(2, repeats=1, warmup=1)
    assert log[:2] == ["A:p", "B:p"]


def test_a_prompt_has_the_same_seed_on_every_side_and_in_every_repeat():
    _, _, sides = run(2, repeats=2, warmup=0, seed=7)
    for backend in sides.values():
        seeds = {prompt: {p.seed for q, p in backend.calls if q == prompt} for prompt in "pqr"}
        assert seeds == {"p": {7}, "q": {8}, "r": {9}}


def test_progress_runs_from_nothing_to_all():
    seen = []
    backend = ScriptedBackend(lambda *_: [1])
    plan = Plan(PROMPTS, SamplingParams(), repeats=2, warmup=1)
    run_rounds({"A": backend}, plan, lambda done, total, what: seen.append((done, total, what)))
    assert [done for done, _, _ in seen] == [*range(7), 7]
    assert {total for _, total, _ in seen} == {7}
    assert seen[0][2].startswith("warm-up")


def test_an_interrupt_passes_through():
    def script(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_rounds({"A": ScriptedBackend(script)}, Plan(PROMPTS, SamplingParams()))
