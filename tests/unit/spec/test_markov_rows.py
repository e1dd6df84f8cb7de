import torch

from lean_laguna.spec.markov_rows import MarkovRows
from support.drafters import DSPARK, HIDDEN, VOCAB, dspark_json, random_drafter, random_rows


def test_rows_are_the_heads_own_whatever_is_kept():
    drafter = random_drafter(dspark_json())
    hidden = random_rows(3, HIDDEN, seed=1)
    for max_bytes in (0, 2 * 4 * VOCAB, 1 << 20):
        rows = MarkovRows(drafter, max_bytes)
        for tokens in ([5, 9, 5], [7, 5], [9]):
            rows.refresh()
            expected = drafter.markov_bias(drafter.markov_rows(torch.tensor(tokens)))
            for found, row in zip(rows.biases(tokens), expected, strict=True):
                torch.testing.assert_close(torch.from_numpy(found), row)
    own = torch.tensor(rows.guesses(hidden))
    after = torch.tensor([rows.guess_after(token) for token in (4, 8, 15)])
    expected = drafter.confidence_logits(hidden, drafter.markov_rows(torch.tensor([4, 8, 15])))
    torch.testing.assert_close(own + after, expected, atol=1e-5, rtol=1e-5)


def test_a_head_that_does_not_read_the_token_before_adds_nothing_for_it():
    drafter = random_drafter(dspark_json(dspark_config={**DSPARK, "confidence_head_with_markov": False}))
    rows, hidden = MarkovRows(drafter), random_rows(1, HIDDEN, seed=1)
    assert rows.guess_after(3) == 0.0
    expected = drafter.confidence_logits(hidden, drafter.markov_rows(torch.tensor([3])))
    torch.testing.assert_close(torch.tensor(rows.guesses(hidden)), expected, atol=1e-5, rtol=1e-5)


def test_changed_weights_are_noticed():
    drafter = random_drafter(dspark_json())
    rows = MarkovRows(drafter)
    rows.refresh()
    before = rows.biases([5])[0].copy()
    with torch.no_grad():
        drafter.markov_w2.mul_(2)
    rows.refresh()
    torch.testing.assert_close(torch.from_numpy(rows.biases([5])[0]), torch.from_numpy(2 * before))
