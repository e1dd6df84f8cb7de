import torch

from lean_laguna.core.drafter_config import DFlashConfig
from lean_laguna.models.dspark import DSparkDrafter
from support.drafters import DSPARK, HIDDEN, VOCAB, dspark_json, random_drafter, random_rows, speculators_json


def test_heads_start_without_effect():
    drafter = DSparkDrafter(DFlashConfig.from_dict(dspark_json()))
    drafter.init_weights(generator=torch.Generator().manual_seed(0))
    rows = drafter.markov_rows(torch.arange(VOCAB))
    assert rows.norm(dim=-1).mean() > 0.5
    assert not drafter.markov_bias(rows).any()
    guesses = drafter.confidence_logits(random_rows(VOCAB, HIDDEN, seed=1), rows).sigmoid()
    assert torch.equal(guesses, torch.full((VOCAB,), 0.5))


def test_the_bias_is_the_product_of_two_tables():
    drafter = random_drafter(dspark_json())
    previous = torch.tensor([[3, 9], [60, 3]])
    table = drafter.markov_w1 @ drafter.markov_w2.T
    torch.testing.assert_close(drafter.markov_bias(drafter.markov_rows(previous)), table[previous])


def test_confidence_reads_hidden_state_and_previous_token():
    drafter = random_drafter(dspark_json())
    hidden, previous = random_rows(5, HIDDEN, seed=2), torch.arange(5)
    weight, bias = drafter.confidence_weight[0], drafter.confidence_bias
    expected = hidden @ weight[:HIDDEN] + drafter.markov_w1[:5] @ weight[HIDDEN:] + bias
    found = drafter.confidence_logits(hidden, drafter.markov_rows(previous))
    torch.testing.assert_close(found, expected)
    plain = random_drafter(dspark_json(dspark_config={**DSPARK, "confidence_head_with_markov": False}))
    found = plain.confidence_logits(hidden, plain.markov_rows(previous))
    torch.testing.assert_close(found, hidden @ plain.confidence_weight[0] + plain.confidence_bias)


def test_a_reduced_vocabulary_is_biased_where_its_words_are():
    given = speculators_json(speculators_model_type="dspark", draft_vocab_size=20, **DSPARK)
    drafter = random_drafter(given)
    drafter.d2t.copy_(torch.arange(20) * 2 + 1)  # draft word i is target word 3 i + 1
    bias = drafter.markov_bias(drafter.markov_rows(torch.tensor([7])))[0]
    own = drafter.markov_w1[7] @ drafter.markov_w2.T
    torch.testing.assert_close(bias[1::3][:20], own)
    assert int((bias != 0).sum()) == 20


def test_a_drafter_without_a_confidence_head_has_none():
    drafter = random_drafter(dspark_json(dspark_config={**DSPARK, "enable_confidence_head": False}))
    assert drafter.confidence_weight is None
    assert drafter.confidence_bias is None
