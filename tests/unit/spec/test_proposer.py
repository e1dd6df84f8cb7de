import pytest
import torch

from lean_laguna.core.types import SamplingParams
from lean_laguna.spec.noise import NoiseCache
from lean_laguna.spec.proposer import DFlashProposer, DraftRequest, Proposer
from lean_laguna.spec.sampling import SamplingRequest, sample_drafts
from support.drafters import (
    HIDDEN,
    VOCAB,
    PagedContext,
    laguna_json,
    random_drafter,
    random_rows,
    speculators_json,
    zlab_json,
)

MASK = 12
LIMIT = 256


class Ends:
    """An embedding and a head at random."""

    table = random_rows(VOCAB, HIDDEN, seed=1)
    head = random_rows(VOCAB, HIDDEN, seed=2)

    def embed(self, input_ids):
        return self.table[input_ids]

    def compute_logits(self, hidden):
        return hidden @ self.head.T


def sequence(num_prompt, output, **params):
    request = SamplingRequest(SamplingParams(**params), list(range(num_prompt)), seed=3, vocab_size=VOCAB)
    request.commit(output)
    return request


def served(config, contexts):
    """A drafter with the context of several requests written, ``contexts[r]`` positions of request r."""
    drafter = random_drafter(config)
    paged = PagedContext(drafter, len(contexts), LIMIT + 32)
    proposer: Proposer = DFlashProposer(drafter, Ends())
    for request, num in enumerate(contexts):
        if num:
            taps = random_rows(num, 3, HIDDEN, seed=10 + request)
            proposer.append_context(taps, paged.batch({request: (0, num)}), paged.cache)
    return drafter, proposer, paged


def asked(paged, index, request, num):
    return DraftRequest(request, num, (tuple(paged.tables[index]),) * 4)


@pytest.mark.parametrize("config", [laguna_json(), zlab_json(), speculators_json()])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.8, "top_k": 20}])
def test_drafts_come_from_the_mask_rows_of_one_block(config, params):
    drafter, proposer, paged = served(config, [9])
    request = sequence(7, [5, 6, 8], **params)
    batch = paged.batch({0: (9, 5)}, torch.tensor([8, MASK, MASK, MASK, MASK]))
    with torch.no_grad():
        hidden = drafter.propose(batch, paged.cache, Ends().embed)
        logits = drafter.compute_logits(hidden[1:], Ends().compute_logits)
    expected = sample_drafts(logits, [request], [4], NoiseCache(VOCAB))
    assert proposer.propose([asked(paged, 0, request, 4)], paged.cache, NoiseCache(VOCAB)) == expected


def test_requests_with_any_lengths_are_drafted_together_as_if_alone():
    _, proposer, paged = served(laguna_json(), [9, 30, 4, 17])
    requests = [
        sequence(9, [1], temperature=0.0),
        sequence(20, list(range(11)), temperature=1.0),
        sequence(4, [2], temperature=0.7, repetition_penalty=1.5),
        sequence(10, [3] * 8, temperature=0.0, min_tokens=9, bad_words=()),
    ]
    lengths = [2, 5, 0, 3]
    together = proposer.propose(
        [asked(paged, i, r, n) for i, (r, n) in enumerate(zip(requests, lengths, strict=True))],
        paged.cache,
        NoiseCache(VOCAB),
    )
    assert [len(drafts) for drafts in together] == lengths
    for i, (request, num) in enumerate(zip(requests, lengths, strict=True)):
        alone = proposer.propose([asked(paged, i, request, num)], paged.cache, NoiseCache(VOCAB))
        assert alone == [together[i]]


def test_it_says_what_it_needs_of_the_target():
    _, proposer, _ = served(laguna_json(), [])
    assert proposer.max_draft_tokens == 5
    assert proposer.target_layer_ids == (1, 3, 5)
    assert [group.name for group in proposer.kv_groups()] == ["draft_full", "draft_sliding"]


def test_no_more_drafts_than_the_block_holds():
    _, proposer, paged = served(laguna_json(), [5])
    request = sequence(5, [1])
    assert len(proposer.propose([asked(paged, 0, request, 99)], paged.cache, NoiseCache(VOCAB))[0]) == 5


@pytest.mark.parametrize(("anchor", "drafts"), [(250, 5), (251, 4), (254, 1), (255, 0), (256, 0), (270, 0)])
def test_drafting_stops_at_the_drafters_last_position(anchor, drafts):
    _, proposer, paged = served(laguna_json(), [9])
    request = sequence(anchor, [1])
    assert request.next_position - 1 == anchor
    (found,) = proposer.propose([asked(paged, 0, request, 5)], paged.cache, NoiseCache(VOCAB))
    assert len(found) == drafts


def test_context_beyond_the_drafters_last_position_is_left_out():
    _, proposer, paged = served(laguna_json(), [0, 0])
    taps = random_rows(9, 3, HIDDEN, seed=5)
    proposer.append_context(taps, paged.batch({0: (252, 6), 1: (3, 3)}), paged.cache)
    _, other, clean = served(laguna_json(), [0, 0])
    other.append_context(taps[:4], clean.batch({0: (252, 4)}), clean.cache)
    other.append_context(taps[6:], clean.batch({1: (3, 3)}), clean.cache)
    for mine, theirs in zip(paged.cache.layer(3, 1), clean.cache.layer(3, 1), strict=True):
        assert torch.equal(mine, theirs)
    proposer.append_context(taps[:2], paged.batch({0: (256, 2)}), paged.cache)
    assert torch.equal(paged.cache.layer(3, 0)[0], clean.cache.layer(3, 0)[0])


def test_a_reduced_vocabulary_drafts_target_ids():
    config = speculators_json(draft_vocab_size=10)
    drafter, proposer, paged = served(config, [9])
    kept = torch.tensor([0, 3, 7, 12, 20, 21, 22, 40, 50, 63])
    drafter.d2t = kept - torch.arange(10)
    request = sequence(9, [4], temperature=3.0)
    (drafts,) = proposer.propose([asked(paged, 0, request, 5)], paged.cache, NoiseCache(VOCAB))
    assert len(drafts) == 5
    assert set(drafts) <= set(kept.tolist())


def test_nothing_asked_for_nothing_computed():
    _, proposer, paged = served(laguna_json(), [9])
    proposer.target = None
    assert proposer.propose([asked(paged, 0, sequence(9, [1]), 0)], paged.cache, NoiseCache(VOCAB)) == [[]]
