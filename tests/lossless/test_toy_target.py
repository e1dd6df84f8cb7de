"""ON equals OFF for every sampling option, function by function: any target, any drafter, any length."""

import random

import pytest
import torch

from lean_laguna.core.types import SamplingParams
from lean_laguna.spec.noise import NoiseCache, derive_seed
from lean_laguna.spec.sampling import RowBlock, sample_rows
from support.decoding import (
    EOS,
    ToyTarget,
    decode,
    model_drafter,
    new_request,
    random_drafter,
    scripted_drafter,
)

VOCAB = 16
CASES = 400


def random_params(rng):
    """Each option is on in about a third of the cases, all of them together in some."""

    def maybe(values, neutral):
        return rng.choice(values) if rng.random() < 0.35 else neutral

    max_tokens = rng.choice([1, 2, 7, 20, 40])
    return SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.4, 1.0, 2.0]),
        top_p=maybe([0.3, 0.8, 0.95], 1.0),
        top_k=maybe([1, 3, 10], 0),
        min_p=maybe([0.02, 0.3], 0.0),
        repetition_penalty=maybe([0.7, 1.1, 1.8], 1.0),
        presence_penalty=maybe([-1.5, 0.7], 0.0),
        frequency_penalty=maybe([-0.5, 0.4, 2.0], 0.0),
        logit_bias=maybe([{3: 2.5}, {1: -100.0, 5: 3.0}, {EOS: -2.0}], None),
        min_tokens=min(max_tokens, maybe([1, 5, 12], 0)),
        max_tokens=max_tokens,
        stop_token_ids=maybe([(7,), (8, EOS)], ()),
        ignore_eos=rng.random() < 0.3,
        logprobs=maybe([0, 1, 5], None),
    )


def random_case(seed):
    rng = random.Random(seed)
    target = ToyTarget(VOCAB, salt=seed, spread=rng.choice([0.5, 2.0, 5.0]))
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 6))]
    bad = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 3))] for _ in range(rng.choice([0, 0, 1, 4]))]
    params = random_params(rng)
    noise_seed = rng.choice([0, 7, 2**64 - 1])
    limit = len(prompt) + rng.choice([3, 15, 10**6])

    def fresh():
        return new_request(target, prompt, params, seed=noise_seed, bad_word_ids=bad)

    return rng, target, fresh, limit


@pytest.mark.parametrize("part", range(8))
def test_speculation_changes_nothing(part):
    num_accepted = 0
    for seed in range(part, CASES, 8):
        rng, target, fresh, limit = random_case(seed)
        plain = decode(target, fresh(), context_limit=limit)
        noise = NoiseCache(VOCAB, max_rows=rng.choice([None, 1, 5]))
        for drafter in (
            random_drafter(VOCAB, 5, rng),
            scripted_drafter(plain.token_ids, VOCAB, 1, 0.8, rng),
            scripted_drafter(plain.token_ids, VOCAB, 9, 1.0, rng),
            scripted_drafter([*plain.token_ids, *[EOS] * 9], VOCAB, 9, 0.7, rng),
            model_drafter(ToyTarget(VOCAB, salt=seed), 7, rng),
        ):
            drafted = decode(target, fresh(), drafter, noise=noise, context_limit=limit)
            assert drafted.outcome() == plain.outcome()
            num_accepted += drafted.stats.num_accepted_tokens
    assert num_accepted > CASES // 8, "drafts must have been accepted for this to mean anything"


def test_a_batch_of_requests_decodes_each_as_if_alone():
    for seed in range(30):
        cases = [random_case(1000 + 7 * seed + index) for index in range(4)]
        target = cases[0][1]
        requests, drafts = [], []
        for rng, _, fresh, _ in cases:
            request = fresh()
            request.commit([rng.randrange(VOCAB) for _ in range(rng.randint(0, 9))])
            requests.append(request)
            drafts.append([rng.randrange(-1, VOCAB) for _ in range(rng.randint(0, 5))])
        rows = [
            target.rows([*request.prompt_token_ids, *request.output_token_ids], draft)
            for request, draft in zip(requests, drafts, strict=True)
        ]
        blocks = [RowBlock(request, draft) for request, draft in zip(requests, drafts, strict=True)]
        together = sample_rows(torch.cat(rows), blocks, NoiseCache(VOCAB))
        for index, block in enumerate(blocks):
            alone = sample_rows(rows[index], [block], NoiseCache(VOCAB))
            assert together.token_ids[index] == alone.token_ids[0]
            assert together.logprobs(index, block.num_rows, 4) == alone.logprobs(0, block.num_rows, 4)


def greedy(**params):
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 60, "ignore_eos": True, **params})


def oracle_for(target, prompt, params):
    plain = decode(target, new_request(target, prompt, params))
    return plain, scripted_drafter(plain.token_ids, VOCAB, 8, 1.0, random.Random(0))


@pytest.mark.parametrize(
    "penalty", [{"frequency_penalty": 2.0}, {"frequency_penalty": -2.0}, {"presence_penalty": 2.0}]
)
def test_penalties_count_every_committed_token(penalty):
    target = ToyTarget(VOCAB, salt=1)
    params = greedy(**penalty)
    plain, oracle = oracle_for(target, [1, 2], params)
    drafted = decode(target, new_request(target, [1, 2], params), oracle)
    assert drafted.outcome() == plain.outcome()
    assert drafted.stats.mean_acceptance_length > 3
    assert decode(target, new_request(target, [1, 2], greedy())).token_ids != plain.token_ids


def test_min_tokens_counts_tokens_not_steps():
    target = ToyTarget(VOCAB, salt=2)
    params = greedy(min_tokens=25, ignore_eos=False, logit_bias={EOS: 100.0})
    plain, oracle = oracle_for(target, [1, 2], params)
    drafted = decode(target, new_request(target, [1, 2], params), oracle)
    assert len(plain.token_ids) == 26
    assert plain.token_ids.index(EOS) == 25
    assert drafted.outcome() == plain.outcome()
    assert drafted.stats.num_steps < 20


@pytest.mark.parametrize("at", range(12))
def test_any_produced_token_declared_a_stop_ends_the_output_there(at):
    target = ToyTarget(VOCAB, salt=3)
    free, oracle = oracle_for(target, [4], greedy())
    stop = free.token_ids[at]
    first = free.token_ids.index(stop)
    stopped = decode(target, new_request(target, [4], greedy(stop_token_ids=(stop,))), oracle)
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)


@pytest.mark.parametrize("max_tokens", range(1, 14))
def test_as_many_tokens_as_asked_for_come_out_whatever_the_accepted_length(max_tokens):
    target = ToyTarget(VOCAB, salt=4)
    free, oracle = oracle_for(target, [4], greedy())
    cut = decode(target, new_request(target, [4], greedy(max_tokens=max_tokens, logprobs=2)), oracle)
    assert cut.token_ids == free.token_ids[:max_tokens]
    assert len(cut.logprobs) == max_tokens
    assert cut.finish_reason == "length"


@pytest.mark.parametrize(("stop_at", "limit"), [(5, 6), (6, 6), (6, 5)])
def test_stop_and_limit_inside_one_block_end_it_in_order(stop_at, limit):
    target = ToyTarget(VOCAB, salt=5)
    free, oracle = oracle_for(target, [4], greedy())
    seen = 0

    def stop_text(token):
        nonlocal seen
        seen += 1
        return "x" if seen == stop_at else None

    cut = decode(target, new_request(target, [4], greedy(max_tokens=limit)), oracle, stop_text=stop_text)
    assert cut.token_ids == free.token_ids[: min(stop_at, limit)]
    assert (cut.finish_reason, cut.stop_reason) == (("stop", "x") if stop_at <= limit else ("length", None))


def test_completions_of_one_request_differ_and_the_first_is_the_request_alone():
    target = ToyTarget(VOCAB, salt=6, spread=1.0)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    outputs = [
        decode(target, new_request(target, [1], params, seed=derive_seed(11, index))).token_ids
        for index in range(4)
    ]
    assert outputs[0] == decode(target, new_request(target, [1], params, seed=11)).token_ids
    assert len({tuple(tokens) for tokens in outputs}) == 4


def test_the_neutral_values_of_every_option_change_nothing():
    target = ToyTarget(VOCAB, salt=7)
    neutral = SamplingParams(
        temperature=1.0, top_p=1.0, top_k=-1, min_p=0.0, repetition_penalty=1.0, presence_penalty=0.0,
        frequency_penalty=0.0, logit_bias={}, min_tokens=0, max_tokens=30, stop_token_ids=(), bad_words=(),
    )  # fmt: skip
    plain = SamplingParams(max_tokens=30)
    first, second = (decode(target, new_request(target, [1], params, seed=3)) for params in (plain, neutral))
    assert first.outcome() == second.outcome()
