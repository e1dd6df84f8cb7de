import itertools
import random

import pytest

from lean_laguna.core.types import SamplingParams
from lean_laguna.engine.output import Completion
from lean_laguna.engine.prefix_cache import prefix_keys
from lean_laguna.engine.scheduler import Scheduler, SchedulerLimits
from lean_laguna.engine.sequence import RequestState, SequenceState
from lean_laguna.models.kv_cache import KVGroup
from lean_laguna.spec.request import SamplingRequest

CHUNK, BLOCK, WINDOW = 8, 4, 8


class NoText:
    def push(self, ids):
        return ""

    def flush(self):
        return ""


def make_scheduler(full=64, sliding=64, max_num_seqs=4, caching=True, max_draft_tokens=3, **limits):
    limits = SchedulerLimits(max_num_seqs, CHUNK, BLOCK, max_draft_tokens, **limits)
    groups = [KVGroup("full", 1, 1, 4, None), KVGroup("sliding", 1, 1, 4, WINDOW)]
    return Scheduler(limits, groups, [full + 1, sliding + 1], enable_prefix_caching=caching)


_ids = itertools.count()


def make_sequence(prompt, max_tokens=8, prompt_logprobs=None):
    params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=prompt_logprobs)
    request = RequestState(f"r{next(_ids)}", None, tuple(prompt), params, None)
    sequence = SequenceState(
        request,
        0,
        SamplingRequest(params, prompt, seed=0, vocab_size=1000),
        Completion(params, max_tokens, (), NoText()),
        max_positions=len(prompt) + max_tokens - 1,
        prefix_keys=prefix_keys(prompt, CHUNK),
    )
    request.sequences.append(sequence)
    return sequence


def step(scheduler, accepted=0):
    """Do what the engine does, without a model; return the plan."""
    plan = scheduler.schedule()
    for chunk in plan.prefill:
        scheduler.prepare(chunk.sequence, chunk.end - chunk.start)
        scheduler.chunk_done(chunk)
        if chunk.is_last:
            chunk.sequence.completion.append([1], 0)
    for sequence in plan.decode:
        num_rows = min(accepted + 1, sequence.completion.num_remaining)
        scheduler.prepare(sequence, num_rows)
        sequence.completion.append([1] * num_rows, num_rows - 1)
        sequence.num_computed += num_rows
    for sequence in dict.fromkeys([*plan.decode, *(chunk.sequence for chunk in plan.prefill)]):
        if sequence.completion.finish_reason:
            scheduler.remove(sequence)
    return plan


def run(scheduler):
    while scheduler.waiting or scheduler.running:
        step(scheduler)


def assert_nothing_held(scheduler):
    if scheduler.prefix_cache is not None:
        scheduler.prefix_cache.clear()
    assert all(pool.num_in_use == 0 and pool.num_available == pool.capacity for pool in scheduler.pools)
    assert scheduler._num_reserved == [0, 0]
    assert not scheduler._in_flight


def chunks(plan):
    return [(chunk.start, chunk.end) for chunk in plan.prefill]


def test_chunks_end_at_absolute_multiples():
    scheduler = make_scheduler()
    scheduler.add(make_sequence(range(19)))
    assert [chunks(step(scheduler)) for _ in range(3)] == [[(0, 8)], [(8, 16)], [(16, 19)]]


def test_chunk_after_a_hit_starts_where_it_would_have_without():
    scheduler = make_scheduler()
    scheduler.add(make_sequence(range(19)))
    run(scheduler)
    second = make_sequence([*range(17), 99, 98, 97])
    scheduler.add(second)
    assert chunks(step(scheduler)) == [(16, 20)]
    assert second.num_cached_tokens == 16


def test_step_computes_at_most_one_chunk_size_of_prompt_rows():
    scheduler = make_scheduler()
    for prompt in ([1] * 5, [2] * 3, [3] * 9, [4] * 2):
        scheduler.add(make_sequence(prompt))
    assert chunks(step(scheduler)) == [(0, 5), (0, 3)]
    assert chunks(step(scheduler)) == [(0, 8)]


def test_a_step_may_take_several_chunks_and_fewer_while_others_decode():
    scheduler = make_scheduler(prefill_rows=3 * CHUNK, prefill_rows_beside=CHUNK)
    scheduler.add(make_sequence(range(29), max_tokens=9))
    scheduler.add(make_sequence(range(100, 110)))
    assert chunks(step(scheduler)) == [(0, 8), (8, 16), (16, 24)]
    assert chunks(step(scheduler)) == [(24, 29)]  # the other's first chunk would keep it waiting
    assert chunks(step(scheduler)) == [(0, 8)]
    assert chunks(step(scheduler)) == [(8, 10)]
    scheduler.add(make_sequence(range(200, 220)))
    plan = step(scheduler)
    assert chunks(plan) == [(0, 8)]
    assert len(plan.decode) == 2
    # Windowed layers took pages chunk by chunk, never more than for one.
    assert scheduler.quotas(29)[1] == scheduler.quotas(290)[1] == 5


def test_request_joins_while_another_decodes():
    scheduler = make_scheduler()
    first, second = make_sequence([1] * 5), make_sequence([2] * 5)
    scheduler.add(first)
    step(scheduler)
    scheduler.add(second)
    plan = step(scheduler)
    assert plan.decode == [first]
    assert [chunk.sequence for chunk in plan.prefill] == [second]


def test_request_waits_until_its_blocks_are_free():
    scheduler = make_scheduler(full=6)
    first, second = make_sequence([1] * 10, max_tokens=8), make_sequence([2] * 10, max_tokens=8)
    scheduler.add(first)
    scheduler.add(second)
    step(scheduler)
    assert list(scheduler.waiting) == [second]
    while not first.completion.finish_reason:
        step(scheduler)
    step(scheduler)
    assert second.is_admitted
    run(scheduler)
    assert_nothing_held(scheduler)


def test_small_request_does_not_overtake_one_that_waits_for_room():
    scheduler = make_scheduler(full=6)
    for prompt in ([1] * 10, [2] * 10, [3]):
        scheduler.add(make_sequence(prompt))
    step(scheduler)
    assert len(scheduler.waiting) == 2


def test_windowed_quota_limits_admission():
    quota = make_scheduler().quotas(40)[1]
    scheduler = make_scheduler(sliding=2 * quota)
    for i in range(3):
        scheduler.add(make_sequence([i] * 33))
    step(scheduler)
    assert len(scheduler.running) == 2
    run(scheduler)
    assert_nothing_held(scheduler)


def test_max_num_seqs_limits_admission():
    scheduler = make_scheduler(max_num_seqs=2)
    for i in range(5):
        scheduler.add(make_sequence([i] * 3))
    step(scheduler)
    assert len(scheduler.running) == 2
    run(scheduler)


def test_same_prompt_is_computed_once():
    scheduler = make_scheduler()
    sequences = [make_sequence(range(20)) for _ in range(3)]
    for sequence in sequences:
        scheduler.add(sequence)
    run(scheduler)
    assert [sequence.num_cached_tokens for sequence in sequences] == [0, 16, 16]
    assert_nothing_held(scheduler)


def test_waiting_for_a_shared_prefix_ends_when_its_owner_is_aborted():
    scheduler = make_scheduler()
    first, second = make_sequence(range(20)), make_sequence(range(20))
    scheduler.add(first)
    scheduler.add(second)
    step(scheduler)
    assert not second.is_admitted
    scheduler.remove(first)
    step(scheduler)
    assert second.is_admitted
    assert second.num_cached_tokens == 8
    run(scheduler)
    assert_nothing_held(scheduler)


def test_other_prompts_pass_one_that_waits_for_a_shared_prefix():
    scheduler = make_scheduler()
    first, same, other = make_sequence(range(20)), make_sequence(range(20)), make_sequence([5])
    for sequence in (first, same, other):
        scheduler.add(sequence)
    step(scheduler)
    assert other.is_admitted
    assert list(scheduler.waiting) == [same]


def test_prompt_logprobs_compute_every_row():
    scheduler = make_scheduler()
    scheduler.add(make_sequence(range(20)))
    run(scheduler)
    sequence = make_sequence(range(20), prompt_logprobs=1)
    scheduler.add(sequence)
    run(scheduler)
    assert sequence.num_cached_tokens == 0


def test_without_prefix_cache_nothing_is_kept():
    scheduler = make_scheduler(caching=False)
    for _ in range(2):
        scheduler.add(make_sequence(range(20)))
    run(scheduler)
    assert all(pool.num_cached_only == 0 for pool in scheduler.pools)
    assert_nothing_held(scheduler)


@pytest.mark.parametrize("num_steps", range(6))
def test_removal_at_any_time_frees_everything(num_steps):
    scheduler = make_scheduler()
    sequence = make_sequence(range(20))
    scheduler.add(sequence)
    for _ in range(num_steps):
        step(scheduler)
    scheduler.remove(sequence)
    assert all(pool.num_in_use == 0 for pool in scheduler.pools)
    assert_nothing_held(scheduler)


@pytest.mark.parametrize("seed", range(8))
def test_random_load_never_runs_out_and_leaks_nothing(seed):
    rng = random.Random(seed)
    scheduler = make_scheduler(
        full=rng.randint(12, 40),
        sliding=rng.randint(10, 30),
        max_num_seqs=rng.randint(1, 6),
        prefill_rows=rng.choice((0, 3 * CHUNK)),
    )
    alive = []
    for _ in range(300):
        if rng.random() < 0.4:
            shared = [rng.randrange(2)] * rng.choice([0, 8, 16])
            prompt = shared + [rng.randrange(9) for _ in range(rng.randint(1, 14))]
            sequence = make_sequence(prompt, max_tokens=rng.randint(1, 18))
            alive.append(sequence)
            scheduler.add(sequence)
        if alive and rng.random() < 0.1:
            victim = rng.choice(alive)
            if not victim.completion.finish_reason:
                victim.completion.abort()
                scheduler.remove(victim)
        step(scheduler, accepted=rng.randrange(4))
        alive = [sequence for sequence in alive if not sequence.completion.finish_reason]
        for group, pool in enumerate(scheduler.pools):
            held = sum(sequence.tables[group].num_held for sequence in scheduler.running)
            assert pool.num_in_use <= held
            assert all(s.tables[group].num_held <= s.quotas[group] for s in scheduler.running)
    run(scheduler)
    assert_nothing_held(scheduler)
