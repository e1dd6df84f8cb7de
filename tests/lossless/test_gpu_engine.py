"""On the Triton kernels, run ahead: drafts, neighbours, cached prefixes and cancellations change nothing.

Under Triton's interpreter where there is no GPU. Compared are tokens and the hashes of the logits that they
were chosen from.
"""

from __future__ import annotations

import copy
import gc
import hashlib
import weakref
from statistics import median
from types import SimpleNamespace

import pytest

pytest.importorskip("triton", reason="Triton is not installed; it comes with PyTorch's CUDA builds")

from lean_laguna.core.types import SamplingParams
from lean_laguna.engine import gpu_programs
from lean_laguna.engine.gpu_engine import GpuEngine
from lean_laguna.spec.dspark_proposer import make_proposer
from support.engines import assert_nothing_held, run_all, tokens_of
from support.gpu import EOS, toy_config, toy_drafter, toy_engine, toy_target, toy_tokenizer

pytestmark = pytest.mark.interpreted

PROMPTS = [[token % 200 + 20 for token in tokens_of(i, n)] for i, n in enumerate((5, 11, 3))]
LONG = [token % 200 + 20 for token in tokens_of(7, 17)]


def params(i, max_tokens=6, **options):
    return SamplingParams(
        temperature=0.9 * (i % 2), max_tokens=max_tokens, ignore_eos=True, seed=i, **options
    )


class Run:
    """Requests through one engine, with a hash of each one's logits."""

    def __init__(self, engine, *requests, **options):
        self.engine = engine
        self._hashes = {}
        engine.watch_logits(self._watch)
        self.states = [engine.add_request(*request, **options) for request in requests]

    def _watch(self, sequence, logits):
        digests = self._hashes.setdefault(sequence, [])
        digests += [hashlib.sha256(row.numpy().tobytes()).hexdigest() for row in logits]

    def finish(self):
        run_all(self.engine)
        assert_nothing_held(self.engine)
        return self.found()

    def found(self):
        found = []
        for state in self.states:
            completion = state.sequences[0].completion
            hashes = self._hashes[state.sequences[0]][: len(completion.token_ids)]
            found.append((completion.token_ids, completion.finish_reason, hashes))
        return found


@pytest.fixture(scope="module")
def requests():
    return [(prompt, params(i, 3 + i)) for i, prompt in enumerate(PROMPTS)]


@pytest.fixture(scope="module")
def expected(requests):
    """What a plain engine says to all of them at once."""
    found = Run(toy_engine(), *requests).finish()
    assert [len(tokens) for tokens, *_ in found] == [3, 4, 5]
    assert [len(hashes) for *_, hashes in found] == [3, 4, 5]
    return found


def test_neighbours_change_nothing(requests, expected):
    assert Run(toy_engine(), requests[1]).finish() == expected[1:2]


@pytest.mark.parametrize("num_drafts", [3, pytest.param(7, marks=pytest.mark.slow)])
def test_drafts_and_how_launches_are_split_change_nothing(requests, expected, num_drafts):
    run = Run(toy_engine(num_drafts), *requests)
    assert run.finish() == expected
    counts = run.engine.stats().speculation
    assert counts.num_draft_tokens > counts.num_accepted_tokens


@pytest.mark.slow
def test_launches_of_more_rows_change_nothing(requests, expected, monkeypatch):
    """One launch of 24 rows for all; then of 17 requests, most of which end early and leave their entries."""
    monkeypatch.setattr(gpu_programs, "TRITON_ROWS", 32)
    run = Run(toy_engine(7), *requests)
    rounds = launches_of(run.engine)
    assert run.finish() == expected
    assert {len(launched) for launched in rounds} == {1}
    assert {launched.cols for one in rounds for launched in one} == {32}
    many = [*requests[:2], *((PROMPTS[2], params(i, 2)) for i in range(2, 17))]
    run = Run(toy_engine(max_num_seqs=17), *many)
    assert run.finish()[:2] == expected[:2]


def launches_of(engine):
    """Keep what each round of an engine launched."""
    rounds, read = [], engine._read_round

    def keep(deltas):
        rounds.append(engine._rounds[0].launched)
        read(deltas)

    engine._read_round = keep
    return rounds


def test_the_device_is_told_of_pages_for_many_steps_at_once(monkeypatch):
    """Telling it takes the host as long as a step of a small model takes the device."""
    engine, told = toy_engine(prefill_chunk_size=32), []
    upload = engine._lanes.upload_pages

    def counted(lane, entry):
        told.append(lane.covered[entry])
        upload(lane, entry)

    monkeypatch.setattr(engine._lanes, "upload_pages", counted)
    engine.add_request(list(range(3, 12)), params(0, 20))
    run_all(engine)
    assert any(group.window for group in engine.scheduler.groups)  # the others have all pages at once
    assert len(told) == 1


def test_an_engine_that_is_released_holds_no_memory_of_the_device():
    target, drafter = (
        copy.deepcopy(toy_target()),
        copy.deepcopy(toy_drafter("dflash")),
    )  # others go on with theirs
    proposer = make_proposer(drafter, target)
    engine = GpuEngine(target, toy_tokenizer(), proposer, toy_config(), num_speculative_tokens=3)
    engine.add_request(list(range(3, 12)), params(0, 4))
    run_all(engine)
    programs = engine.programs
    held = [programs.state.words, programs.pools, programs.target.head, programs.scratch.hidden]
    held = [weakref.ref(one) for one in [programs, *held]]
    del programs
    engine.release()
    gc.collect()
    assert [one() for one in held] == [None] * 5
    assert engine.stats().num_finished_requests == 1  # it still says what it was


@pytest.mark.slow
def test_a_cached_prefix_changes_nothing():
    run = Run(toy_engine(3), (LONG, params(1, 4)))
    run_all(run.engine)
    again = Run(run.engine, (LONG, params(1, 4)))
    run_all(again.engine)
    assert again.states[0].snapshot().num_cached_tokens == 16
    assert again.found() == run.found()
    assert Run(toy_engine(enable_prefix_caching=False), (LONG, params(1, 4))).finish() == run.found()


@pytest.mark.slow
def test_cancellations_late_arrivals_and_stop_texts_leave_others_alone(requests, expected):
    engine = toy_engine(3)
    run = Run(engine, requests[1])
    text = engine.tokenizer.decode(expected[0][0][:2])
    stopped = engine.add_request(requests[0][0], params(0, 3, stop=(text[-1:],)))
    doomed = engine.add_request(LONG[:6], params(3, 30))
    for _ in range(3):
        engine.step()
    engine.abort(doomed.request_id)
    run.states.append(engine.add_request(*requests[2]))
    assert run.finish() == expected[1:]
    assert stopped.snapshot().outputs[0].finish_reason == "stop"
    assert doomed.snapshot().outputs[0].finish_reason == "abort"


def test_stop_tokens_and_limits_end_a_request_where_they_stand(requests, expected):
    tokens, _, hashes = expected[2]
    stop = next(i for i, token in enumerate(tokens) if token not in tokens[:i] and i >= 1)
    ended = Run(toy_engine(3), (PROMPTS[2], params(2, 5, stop_token_ids=(tokens[stop], EOS)))).finish()
    assert ended == [(tokens[: stop + 1], "stop", hashes[: stop + 1])]
    assert Run(toy_engine(3), (PROMPTS[2], params(2, 1))).finish() == [(tokens[:1], "length", hashes[:1])]


def test_log_probabilities_are_of_the_same_tokens_and_logits(requests, expected):
    run = Run(toy_engine(3), (PROMPTS[1], params(1, 3, logprobs=2, prompt_logprobs=0)))
    ((tokens, _, hashes),) = run.finish()
    assert tokens == expected[1][0][:3]
    assert hashes == expected[1][2][:3]
    output = run.states[0].snapshot()
    assert len(output.prompt_logprobs) == len(PROMPTS[1])
    assert all(token in row for token, row in zip(tokens, output.outputs[0].logprobs, strict=True))


@pytest.mark.slow
def test_the_most_probable_tokens_are_sampled_from_on_the_device(capsys):
    request = (PROMPTS[1], params(1, 3, top_k=3, top_p=0.9))
    plain, drafting = Run(toy_engine(), request), Run(toy_engine(3), request)
    assert plain.finish() == drafting.finish()
    assert "host" not in capsys.readouterr().err
    logged = Run(toy_engine(3), (PROMPTS[1], params(1, 3, top_k=3, top_p=0.9, logprobs=3)))
    assert logged.finish() == plain.found()
    for token, row in zip(plain.found()[0][0], logged.states[0].snapshot().outputs[0].logprobs, strict=True):
        assert row[token].rank <= 3


@pytest.mark.slow
def test_options_of_the_host_are_lossless_too(capsys):
    request = (PROMPTS[1], params(1, 3, top_p=0.9, repetition_penalty=1.2, min_tokens=2))
    assert Run(toy_engine(3), request).finish() == Run(toy_engine(), request).finish()
    assert "top_p: chosen on the host" in capsys.readouterr().err


def test_a_constraint_that_sleeps_may_wake_up_and_take_a_request_to_the_host():
    engine = toy_engine()
    sequence = engine.add_request(PROMPTS[0], params(0)).sequences[0]
    constraint = SimpleNamespace(is_active=False)
    sequence.sampling.constraints = (constraint,)
    assert not engine._stays_on_host(sequence)
    constraint.is_active = True
    assert engine._stays_on_host(sequence)


def test_a_block_of_another_step_is_no_step_s_answer():
    engine = toy_engine()
    engine.add_request(PROMPTS[0], params(0))
    engine.step()
    engine.programs.said.turn += 1
    with pytest.raises(RuntimeError, match="step 1 left the block of step 0"):
        run_all(engine)


def test_synthetic_acceptance_has_the_rates_it_was_given():
    engine = toy_engine(3, synthetic_rates=(1.0, 1.0, 0.0))
    state = engine.add_request(PROMPTS[0], params(1, 7))
    run_all(engine)
    assert engine.config.is_synthetic
    assert state.snapshot().outputs[0].speculation.num_accepted_tokens_per_pos[:2] == (2, 2)


def test_an_fp8_cache_changes_with_drafts_neighbours_and_chunks_nothing(requests, monkeypatch):
    options = {"kv_cache_dtype": "fp8"}
    expected = Run(toy_engine(**options), *requests).finish()
    assert Run(toy_engine(**options), requests[1]).finish() == expected[1:2]
    # Nor on a card whose kernels take its codes as bytes.
    monkeypatch.setattr("lean_laguna.engine.gpu_programs.has_e4m3", lambda device: False)
    assert Run(toy_engine(3, **options), *requests).finish() == expected


@pytest.mark.slow
def test_a_length_tried_for_one_step_is_timed_though_all_is_laid_out_anew(monkeypatch):
    engine, seen = toy_engine("auto"), []
    lengths = engine._draft_lengths
    turns = iter(range(1000))

    def alternate(sequences):
        chosen = 7 if next(turns) % 2 else 0
        lengths._chosen = [min(chosen, s.completion.num_remaining - 1) for s in sequences]
        return lengths._chosen

    def observe(sequences, accepted, *, draft_s, verify_s, **_):
        seen.append((max(n for n, _ in accepted), draft_s, verify_s))

    monkeypatch.setattr(lengths, "choose", alternate)
    monkeypatch.setattr(lengths, "observe", observe)
    Run(engine, *((prompt, params(i, 10)) for i, prompt in enumerate(PROMPTS))).finish()
    drafted = [draft_s for num, draft_s, _ in seen if num]
    plain = [draft_s for num, draft_s, _ in seen if not num]
    assert drafted
    assert plain
    assert median(drafted) > median(plain)  # one alone may have waited for the machine
