import pytest

from lean_laguna.core.types import SamplingParams
from lean_laguna.server.isolation import step_one_by_one
from lean_laguna.spec.request import SamplingRequest
from support.engines import assert_nothing_held, dflash, make_engine, outcome, plain, run_all, tokens_of

PARAMS = SamplingParams(max_tokens=20, ignore_eos=True, temperature=1.0, logprobs=1)


@pytest.mark.parametrize("seed_at_fault", [0, 2, 4])
def test_only_the_request_at_fault_is_ended_and_no_output_is_lost(monkeypatch, seed_at_fault):
    import dataclasses

    commit = SamplingRequest.commit

    def failing(self, token_ids):
        if self.seed == seed_at_fault and len(self.output_token_ids) >= 4:
            raise RuntimeError("at fault")
        commit(self, token_ids)

    right = {
        seed: outcome(plain(tokens_of(seed, 9), dataclasses.replace(PARAMS, seed=seed)))
        for seed in range(5)
        if seed != seed_at_fault
    }
    monkeypatch.setattr(SamplingRequest, "commit", failing)
    engine = make_engine(dflash())
    states = {
        seed: engine.add_request(tokens_of(seed, 9), dataclasses.replace(PARAMS, seed=seed))
        for seed in range(5)
    }
    said = {state.request_id: "" for state in states.values()}
    failed = {}
    while engine.has_unfinished:
        try:
            deltas = engine.step()
        except RuntimeError:
            deltas, new = step_one_by_one(engine)
            failed |= new
        for delta in deltas:
            said[delta.request_id] += delta.text
    assert list(failed) == [states[seed_at_fault].request_id]
    for seed, expected in right.items():
        assert outcome(states[seed].snapshot()) == expected
        assert said[states[seed].request_id] == states[seed].snapshot().outputs[0].text
    assert_nothing_held(engine)


def test_who_ends_in_the_step_that_fails_is_told_though_nobody_else_goes_on(monkeypatch):
    engine = make_engine()
    params = [SamplingParams(max_tokens=4 + 9 * i, ignore_eos=True, seed=i) for i in range(2)]
    ending, wrong = (engine.add_request(tokens_of(i, 9), own) for i, own in enumerate(params))
    commit = SamplingRequest.commit

    def failing(self, token_ids):
        if self.seed == 1 and ending.is_finished:
            raise RuntimeError("at fault")
        commit(self, token_ids)

    monkeypatch.setattr(SamplingRequest, "commit", failing)
    deltas, failed = [], {}
    while engine.has_unfinished:
        try:
            deltas += engine.step()
        except RuntimeError:
            more, failed = step_one_by_one(engine)
            deltas += more
    assert list(failed) == [wrong.request_id]
    assert [delta.request_id for delta in deltas if delta.is_request_finished] == [ending.request_id]
    assert_nothing_held(engine)


@pytest.mark.interpreted
@pytest.mark.parametrize("num_drafts", [None, pytest.param(3, marks=pytest.mark.slow)])
def test_where_steps_run_ahead_a_fault_found_late_is_nobody_else_s(monkeypatch, num_drafts):
    """What a step says of all its requests is read in one go, when further ones are under way."""
    pytest.importorskip("triton", reason="Triton is not installed; it comes with PyTorch's CUDA builds")
    from support.gpu import toy_engine

    def started():
        engine, states = toy_engine(num_drafts), []
        for i, length in enumerate((5, 6, 3)):
            prompt = [token % 200 + 20 for token in tokens_of(i, length)]
            params = SamplingParams(max_tokens=6 + i, ignore_eos=True, temperature=0.9, seed=i)
            states.append(engine.add_request(prompt, params))
        return engine, states

    def tokens(states):
        return [state.sequences[0].completion.token_ids for state in states]

    engine, states = started()
    run_all(engine)
    expected = tokens(states)
    commit = SamplingRequest.commit

    def failing(self, token_ids):
        if self.seed == 1 and len(self.output_token_ids) >= 2:
            raise RuntimeError("at fault")
        commit(self, token_ids)

    monkeypatch.setattr(SamplingRequest, "commit", failing)
    engine, states = started()
    failed = {}
    while engine.has_unfinished:
        try:
            engine.step()
        except RuntimeError:
            failed |= step_one_by_one(engine)[1]
    assert list(failed) == [states[1].request_id]
    assert tokens(states)[::2] == expected[::2]
    assert_nothing_held(engine)
