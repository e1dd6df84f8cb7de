import pytest
import torch

from lean_laguna.core.types import SamplingParams
from lean_laguna.engine import threads
from lean_laguna.engine.threads import tune_num_threads
from support.engines import dflash, make_engine


@pytest.fixture(autouse=True)
def same_threads_afterwards():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def with_steps(monkeypatch, seconds):
    """Let a step take ``seconds[number of threads]``; returns which numbers were tried."""
    tried = []

    def step_s(engine):
        tried.append(torch.get_num_threads())
        return seconds[tried[-1]]

    monkeypatch.setattr(threads, "_decode_step_s", step_s)
    monkeypatch.setattr(threads, "_candidates", lambda: sorted(seconds))
    return tried


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({1: 1.0, 2: 0.6, 4: 0.4}, 4),
        ({1: 1.0, 2: 0.6, 4: 0.9}, 2),
        ({1: 1.0, 2: 5.0, 4: 0.1}, 1),
        ({1: 1.0, 2: 0.97}, 1),
        ({1: 1.0}, 1),
    ],
)
def test_the_fastest_number_is_set_and_fewer_win_a_draw(monkeypatch, seconds, chosen):
    with_steps(monkeypatch, seconds)
    assert tune_num_threads(make_engine()) == chosen
    assert torch.get_num_threads() == chosen


def test_with_a_drafter_steps_that_verify_count_too(monkeypatch):
    with_steps(monkeypatch, {1: 1.0, 2: 1.02})
    rows = {1: 3.0, 2: 2.0}
    monkeypatch.setattr(threads, "_verify_step_s", lambda engine: rows[torch.get_num_threads()])
    assert tune_num_threads(make_engine(dflash())) == 2
    assert tune_num_threads(make_engine()) == 1


def test_more_threads_are_not_tried_once_they_do_not_help(monkeypatch):
    tried = with_steps(monkeypatch, {1: 1.0, 2: 1.2, 4: 0.1, 8: 0.1})
    tune_num_threads(make_engine())
    assert tried == [1, 2]


def test_measuring_leaves_nothing_behind_and_changes_no_output():
    engine = make_engine(dflash())
    fresh = make_engine(dflash())
    assert tune_num_threads(engine) >= 1
    assert not engine.has_unfinished
    params = SamplingParams(temperature=0, max_tokens=20)
    outputs = []
    for one in (engine, fresh):
        state = one.add_request([40, 41, 42], params)
        while not state.is_finished:
            one.step()
        outputs.append(state.snapshot().outputs[0].token_ids)
    assert outputs[0] == outputs[1]
