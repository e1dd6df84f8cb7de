import math

import numpy as np
import pytest
import torch

from lean_laguna.core.types import SamplingParams
from lean_laguna.spec import sampling
from lean_laguna.spec.acceptance import accept
from lean_laguna.spec.noise import NoiseCache, gumbel_noise
from lean_laguna.spec.sampling import RowBlock, SamplingRequest, sample_drafts, sample_rows
from support.logits_reference import reference_scores, reference_survivors


def request(vocab_size, seed=0, prompt=(1, 2, 3), bad_word_ids=(), **params):
    return SamplingRequest(
        SamplingParams(**params),
        prompt,
        seed=seed,
        vocab_size=vocab_size,
        eos_token_ids=(0,),
        bad_word_ids=bad_word_ids,
    )


def random_logits(rows, vocab_size, seed=0, spread=3.0):
    values = np.random.default_rng(seed).standard_normal((rows, vocab_size)) * spread
    return torch.from_numpy(values.astype(np.float32))


def test_greedy_takes_the_first_of_equal_maxima():
    logits = torch.tensor([[1.0, 5.0, 5.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    plain = request(4, temperature=0.0)
    biased = request(4, temperature=0.0, logit_bias={3: 0.5})
    for made in (plain, biased):
        assert sample_rows(logits, [RowBlock(made, [1])], NoiseCache(4)).token_ids[0][0] == 1
    assert sample_rows(logits, [RowBlock(plain, [1])], NoiseCache(4)).token_ids[0][1] == 0


def test_a_sampled_token_is_the_argmax_with_the_documented_noise():
    logits = random_logits(4, 500)
    made = request(500, seed=9, temperature=0.7)
    made.commit([5, 6])
    got = sample_rows(logits, [RowBlock(made, [1, 2, 3])], NoiseCache(500)).token_ids[0]
    noise = gumbel_noise([9] * 4, [5, 6, 7, 8], 500)
    assert got == (logits.double().numpy() / 0.7 + noise).argmax(axis=1).tolist()


@pytest.mark.parametrize(
    "filters", [{"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 500, "top_p": 0.99}]
)
def test_noise_drawn_for_few_tokens_or_for_all_chooses_the_same(monkeypatch, filters):
    logits = random_logits(6, 3000)
    requests = [request(3000, seed=s, temperature=t, **filters) for s in range(20) for t in (0.5, 1.5)]
    blocks = [[RowBlock(made, [1] * 5)] for made in requests]
    dense = [sample_rows(logits, block, NoiseCache(3000)).token_ids for block in blocks]
    monkeypatch.setattr(sampling, "_LEAST_SPARSE_VOCAB", 0)
    assert [sample_rows(logits, block, NoiseCache(3000)).token_ids for block in blocks] == dense
    monkeypatch.setattr(sampling, "_SPARSE_SHARE", 1)
    assert [sample_rows(logits, block, NoiseCache(3000)).token_ids for block in blocks] == dense


MIXED = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 1.2, "top_k": 7},
    {"temperature": 0.9, "top_p": 0.8, "frequency_penalty": 0.5},
    {"temperature": 1.0, "min_p": 0.1, "logit_bias": {3: 4.0}},
    {"temperature": 0.5, "min_tokens": 5},
]


def test_requests_of_any_kind_share_a_batch_without_touching_each_other():
    requests = [request(200, seed=index, **params) for index, params in enumerate(MIXED)]
    drafts = [list(range(index % 4)) for index in range(len(MIXED))]
    blocks = [RowBlock(made, draft) for made, draft in zip(requests, drafts, strict=True)]
    logits = random_logits(sum(block.num_rows for block in blocks), 200)
    before = logits.clone()
    together = sample_rows(logits, blocks, NoiseCache(200))
    start = 0
    for index, block in enumerate(blocks):
        rows = logits[start : start + block.num_rows]
        alone = sample_rows(rows, [block], NoiseCache(200))
        assert together.token_ids[index] == alone.token_ids[0]
        assert together.logprobs(index, block.num_rows, 3) == alone.logprobs(0, block.num_rows, 3)
        start += block.num_rows
    assert torch.equal(logits, before), "logits must stay raw: log-probabilities come from them"


def test_logprobs_come_from_raw_logits_whatever_the_options():
    logits = random_logits(1, 50)
    plain = request(50, temperature=0.0)
    bent = request(50, temperature=0.3, top_k=1, repetition_penalty=2.0, logit_bias={7: 100.0})
    raw = sample_rows(logits, [RowBlock(plain)], NoiseCache(50)).logprobs(0, 1, 20)[0]
    got = sample_rows(logits, [RowBlock(bent)], NoiseCache(50)).logprobs(0, 1, 20)[0]
    assert got[7].logprob == pytest.approx(torch.log_softmax(logits.double(), -1)[0, 7].item(), abs=1e-12)
    assert {t: p for t, p in got.items() if p.rank <= 20} == {t: p for t, p in raw.items() if p.rank <= 20}


def test_the_same_seed_gives_the_same_tokens_alone_and_beside_others():
    logits = random_logits(3, 100)
    made = [request(100, seed=seed, temperature=1.0) for seed in (4, 5, 4)]
    tokens = sample_rows(logits[[0, 1, 0]], [RowBlock(m) for m in made], NoiseCache(100)).token_ids
    assert tokens[0] == tokens[2]
    assert sample_rows(logits[:1], [RowBlock(made[0])], NoiseCache(100)).token_ids[0] == tokens[0]


FILTERS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7, "top_k": 4},
    {"top_p": 0.75},
    {"min_p": 0.2},
    {"temperature": 1.3, "min_p": 0.02, "top_k": 5, "top_p": 0.9},
    {"logit_bias": {2: 1.5}, "repetition_penalty": 1.5},
]


@pytest.mark.parametrize("params", FILTERS)
def test_emitted_tokens_follow_the_targets_distribution(params):
    """Chi-square over 8,000 seeds; with fixed seeds this is a fact, not a chance."""
    logits, num = random_logits(1, 7, seed=3, spread=1.2), 8_000
    made = [request(7, seed=seed, prompt=(1, 5), **params) for seed in range(num)]
    blocks = [RowBlock(m) for m in made]
    tokens = sample_rows(logits.expand(num, -1), blocks, NoiseCache(7)).token_ids
    counts = np.bincount([row[0] for row in tokens], minlength=7)
    p = SamplingParams(**params)
    scores = reference_scores(logits[0].tolist(), p, (1, 5), (), (), ())
    kept = reference_survivors(scores, p)
    weights = np.array([math.exp(s / p.temperature) if t in kept else 0.0 for t, s in enumerate(scores)])
    expected = num * weights / weights.sum()
    assert not counts[expected == 0].any()
    chi_square = ((counts - expected) ** 2 / np.where(expected == 0, 1, expected)).sum()
    assert chi_square < 22.5  # 0.999 quantile at six degrees of freedom


@pytest.mark.parametrize("num_drafts", [1, 3])
@pytest.mark.parametrize("drafter", ["coupled", "argmax", "unrelated"])
def test_verified_tokens_follow_the_targets_distribution_whatever_the_drafter(drafter, num_drafts):
    """The first token and the bonus token over many seeds; a draft of one is where others went wrong."""
    rows, num = random_logits(num_drafts + 1, 5, seed=8, spread=1.0), 2500
    drafter_rows = random_logits(num_drafts, 5, seed=9, spread=1.0)
    firsts, bonus = np.zeros(5), np.zeros(5)
    for seed in range(num):
        made, noise = request(5, seed=seed), NoiseCache(5)
        if drafter == "coupled":
            drafts = sample_drafts(drafter_rows, [made], [num_drafts], noise)[0]
        elif drafter == "argmax":
            drafts = drafter_rows.argmax(-1).tolist()
        else:
            drafts = [(seed + i) % 5 for i in range(num_drafts)]
        accepted = accept(drafts, sample_rows(rows, [RowBlock(made, drafts)], noise).token_ids[0])
        firsts[accepted.token_ids[0]] += 1
        if accepted.num_accepted_tokens == num_drafts:
            bonus[accepted.token_ids[-1]] += 1
    for counts, row in ((firsts, 0), (bonus, num_drafts)):
        expected = counts.sum() * torch.softmax(rows[row].double(), -1).numpy()
        assert ((counts - expected) ** 2 / expected).sum() < 18.5  # 0.999 quantile at four degrees of freedom


def acceptance(noise_of_drafter, target, drafter, num):
    p, q = target.double().numpy(), drafter.double().numpy()
    mine = gumbel_noise(range(num), [1] * num, len(p))
    theirs = {"same": mine, "own": gumbel_noise(range(num), [2] * num, len(p)), "none": np.zeros_like(mine)}
    return ((p + mine).argmax(1) == (q + theirs[noise_of_drafter]).argmax(1)).mean()


@pytest.mark.parametrize("quality", [0.3, 0.6, 1.0])
def test_shared_noise_accepts_more_than_independent_draws_and_than_argmax_drafts(quality):
    rng = np.random.default_rng(5)
    target = torch.from_numpy(rng.standard_normal(1024) * 2.5)
    drafter = target + torch.from_numpy(rng.standard_normal(1024) * quality)
    coupled = acceptance("same", target, drafter, 4000)
    distance = 0.5 * (target.softmax(-1) - drafter.softmax(-1)).abs().sum().item()
    # The bound of Gumbel coupling, less three standard errors of 4,000 draws; never above what is possible.
    assert (1 - distance) / (1 + distance) - 3 * math.sqrt(0.25 / 4000) < coupled < 1 - distance + 0.02
    assert coupled > acceptance("own", target, drafter, 4000) + 0.3
    assert coupled > acceptance("none", target, drafter, 4000) + 0.3


def test_drafts_from_the_targets_own_logits_are_always_accepted():
    for index, params in enumerate(MIXED):
        made = request(60, seed=index, bad_word_ids=[(4, 5), (6,)], **params)
        made.commit([7, 4])
        # Rows that do not depend on the drafts: the options and the noise do all the work.
        logits = random_logits(6, 60, seed=index)
        noise = NoiseCache(60)
        (drafts,) = sample_drafts(logits[:5], [made], [5], noise)
        sampled = sample_rows(logits, [RowBlock(made, drafts)], noise).token_ids[0]
        assert accept(drafts, sampled).num_accepted_tokens == 5


def test_drafting_for_many_equals_drafting_for_each():
    counts = [3, 0, 2, 1, 4, 0, 2]
    requests = [request(80, seed=index, **params) for index, params in enumerate(MIXED)]
    logits = random_logits(sum(counts), 80)
    together = sample_drafts(logits, requests, counts, NoiseCache(80))
    assert [len(drafts) for drafts in together] == counts
    start = 0
    for made, num, drafts in zip(requests, counts, together, strict=True):
        assert sample_drafts(logits[start : start + num], [made], [num], NoiseCache(80)) == [drafts]
        start += num
    assert sample_drafts(logits[:0], requests[:2], [0, 0], NoiseCache(80)) == [[], []]


def test_tokens_a_drafter_cannot_propose_are_never_drafted():
    logits = random_logits(40, 30)
    logits[:, 10:] = -math.inf
    for params in ({"temperature": 0.0}, {"temperature": 5.0}, {"temperature": 5.0, "top_p": 0.99}):
        (drafts,) = sample_drafts(logits, [request(30, **params)], [40], NoiseCache(30))
        assert max(drafts) < 10


def test_drafts_obey_min_tokens_and_bad_words_too():
    logits = torch.zeros(5, 6)
    logits[:, 0], logits[:, 4] = 9, 5
    made = request(6, temperature=0.0, min_tokens=3, bad_word_ids=[(4, 4)])
    made.commit([1])
    assert sample_drafts(logits, [made], [5], NoiseCache(6)) == [[4, 1, 0, 0, 0]]
