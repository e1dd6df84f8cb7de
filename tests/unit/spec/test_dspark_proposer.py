import dataclasses

import pytest
import torch

from lean_laguna.core.types import SamplingParams
from lean_laguna.models.dspark import DSparkDrafter
from lean_laguna.spec.draft_schedule import StepCosts
from lean_laguna.spec.dspark_proposer import DSparkProposer, make_proposer
from lean_laguna.spec.noise import NoiseCache
from lean_laguna.spec.proposer import DFlashProposer, DraftRequest
from lean_laguna.spec.sampling import RowBlock, SamplingRequest, sample_rows
from support.drafters import (
    DSPARK,
    HIDDEN,
    VOCAB,
    PagedContext,
    deepspec_json,
    dspark_json,
    laguna_json,
    random_drafter,
    random_rows,
)

TABLE, HEAD = random_rows(VOCAB, HIDDEN, seed=1), random_rows(VOCAB, HIDDEN, seed=2)
PARAMS = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_k": 30},
    {"temperature": 0.7, "presence_penalty": 1.0},
]


class Ends:
    def embed(self, input_ids):
        return TABLE[input_ids]

    def compute_logits(self, hidden):
        return hidden @ HEAD.T


def sequence(num_prompt, output, **params):
    request = SamplingRequest(SamplingParams(**params), list(range(num_prompt)), seed=3, vocab_size=VOCAB)
    request.commit(output)
    return request


def served(given, contexts):
    drafter = random_drafter(given)
    paged = PagedContext(drafter, len(contexts), 64)
    proposer = make_proposer(drafter, Ends())
    for request, num in enumerate(contexts):
        taps = random_rows(num, 3, HIDDEN, seed=10 + request)
        proposer.append_context(taps, paged.batch({request: (0, num)}), paged.cache)
    return drafter, proposer, paged


def asked(paged, index, request, num):
    return DraftRequest(request, num, (tuple(paged.tables[index]),) * 4)


def walk_by_hand(drafter, paged, index, request, num):
    """Draft token by token: a row's logits and the bias by the token before, drawn as a target would."""
    first, mask = drafter.config.first_slot, drafter.config.mask_token_id
    ids = torch.tensor([request.output_token_ids[-1], *[mask] * (num - 1 + first)])
    batch = paged.batch({index: (request.next_position - 1, len(ids))}, ids)
    hidden = drafter.propose(batch, paged.cache, Ends().embed)[first:]
    drafts, chances = [], []
    for k in range(num):
        before = drafts[-1] if drafts else request.output_token_ids[-1]
        logits = hidden[k] @ HEAD.T + drafter.markov_w2 @ drafter.markov_w1[before]
        features = torch.cat([hidden[k], drafter.markov_w1[before]])
        chances.append(torch.sigmoid(features @ drafter.confidence_weight[0] + drafter.confidence_bias[0]))
        later = SamplingRequest(request.params, request.prompt_token_ids, seed=request.seed, vocab_size=VOCAB)
        later.commit([*request.output_token_ids, *drafts])
        drafts += sample_rows(logits[None], [RowBlock(later)], NoiseCache(VOCAB)).token_ids[0]
    return drafts, torch.cumprod(torch.stack(chances), 0).tolist()


@torch.no_grad()
@pytest.mark.parametrize("given", [dspark_json(), deepspec_json()], ids=["fill-in", "shifted"])
@pytest.mark.parametrize("params", PARAMS)
def test_drafts_are_those_of_a_walk_by_hand(given, params):
    drafter, proposer, paged = served(given, [9])
    request = sequence(7, [5, 6, 8], **params)
    expected, _ = walk_by_hand(drafter, paged, 0, request, 5)
    assert proposer.propose([asked(paged, 0, request, 5)], paged.cache, NoiseCache(VOCAB)) == [expected]
    assert proposer.schedule.cut == [()]


def test_requests_with_any_lengths_are_drafted_together_as_if_alone():
    _, proposer, paged = served(dspark_json(), [9, 30, 4, 17])
    requests = [
        sequence(9, [1], temperature=0.0),
        sequence(20, list(range(11)), temperature=1.0),
        sequence(4, [2], temperature=0.7, repetition_penalty=1.5),
        sequence(10, [3] * 8, temperature=0.0, min_tokens=9),
    ]
    lengths = [2, 5, 0, 3]
    wanted = [asked(paged, i, r, n) for i, (r, n) in enumerate(zip(requests, lengths, strict=True))]
    together = proposer.propose(wanted, paged.cache, NoiseCache(VOCAB))
    assert [len(drafts) for drafts in together] == lengths
    for i, request in enumerate(wanted):
        assert proposer.propose([request], paged.cache, NoiseCache(VOCAB)) == [together[i]]


@torch.no_grad()
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafts_are_cut_where_measured_costs_and_confidence_say(temperature):
    drafter, proposer, paged = served(dspark_json(), [9, 12])
    requests = [
        sequence(7, [5, 6, 8], temperature=temperature),
        sequence(11, [2, 1], temperature=temperature),
    ]
    wanted = [asked(paged, i, request, 5) for i, request in enumerate(requests)]
    by_hand = [walk_by_hand(drafter, paged, i, request, 5) for i, request in enumerate(requests)]
    for slope in (0.0, 0.3, 3.0):
        costs = StepCosts([1 + slope * k for k in range(6)], 0.8)
        kept = costs.best_length([chances for _, chances in by_hand])
        proposer.schedule.costs = costs
        before = proposer.schedule.num_cut_draft_tokens
        found = proposer.propose(wanted, paged.cache, NoiseCache(VOCAB))
        assert found == [drafts[:kept] for drafts, _ in by_hand]
        held_back = sum(len(cut) for cut in proposer.schedule.cut)
        assert proposer.schedule.num_cut_draft_tokens - before == held_back
        for (_, chances), cut in zip(by_hand, proposer.schedule.cut, strict=True):
            conditional = [b / a for a, b in zip([1.0, *chances], chances, strict=False)]
            assert list(cut) == pytest.approx(conditional[kept : kept + len(cut)], rel=1e-5)
    assert kept == 0
    proposer.schedule.costs, proposer.schedule.wants_chances = None, True
    assert proposer.propose(wanted, paged.cache, NoiseCache(VOCAB)) == [drafts for drafts, _ in by_hand], (
        "all"
    )
    assert proposer.schedule.cut == [(), ()]
    for (_, chances), told in zip(by_hand, proposer.schedule.survival, strict=True):
        assert told == pytest.approx(chances, rel=1e-5)


def test_greedy_and_sampled_requests_have_their_own_temperatures():
    heads = {**DSPARK, "greedy_temperatures": [50.0], "sampled_temperatures": [1e-3]}
    chances = {}
    for temperature in (0.0, 0.9):
        _, proposer, paged = served(dspark_json(dspark_config=heads), [9])
        proposer.schedule.costs = StepCosts([1.0, *[1e9] * 5], 1.0)
        request = sequence(7, [5, 6, 8], temperature=temperature)
        assert proposer.propose([asked(paged, 0, request, 5)], paged.cache, NoiseCache(VOCAB)) == [[]]
        chances[temperature] = proposer.schedule.cut[0][0]
    assert abs(chances[0.0] - 0.5) < 0.1
    assert abs(chances[0.9] - 0.5) > 0.4


def test_a_drafter_without_a_confidence_head_is_never_cut():
    given = dspark_json(dspark_config={**DSPARK, "enable_confidence_head": False})
    _, proposer, paged = served(given, [9])
    assert proposer.schedule is None
    found = proposer.propose([asked(paged, 0, sequence(7, [5, 6, 8]), 5)], paged.cache, NoiseCache(VOCAB))
    assert len(found[0]) == 5


def test_heads_at_zero_draft_what_dflash_drafts():
    given = dspark_json()
    drafter, proposer, paged = served(given, [9])
    drafter.markov_w2.zero_()
    plain = DFlashProposer(drafter, Ends())
    request = asked(paged, 0, sequence(7, [5, 6, 8], temperature=0.8), 5)
    found = proposer.propose([request], paged.cache, NoiseCache(VOCAB))
    assert found == plain.propose([request], paged.cache, NoiseCache(VOCAB))


def test_the_proposer_is_of_the_drafters_kind():
    assert type(make_proposer(random_drafter(laguna_json()), Ends())) is DFlashProposer
    spark = random_drafter(dspark_json())
    assert isinstance(spark, DSparkDrafter)
    assert type(make_proposer(spark, Ends())) is DSparkProposer
    calibrated = dataclasses.replace(spark.heads, greedy_temperatures=(2.0,))
    spark.set_heads(calibrated)
    assert spark.config.dspark == calibrated
