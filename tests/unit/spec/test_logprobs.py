import math

import numpy as np
import pytest
import torch

from lean_laguna.spec.logprobs import token_logprobs


def test_logprobs_are_the_log_softmax_of_the_raw_logits():
    logits = torch.from_numpy(np.random.default_rng(0).standard_normal((3, 50)).astype(np.float32)) * 4
    expected = torch.log_softmax(logits.double(), dim=-1)
    for row, entry in enumerate(token_logprobs(logits, [7, 0, 49], 5)):
        for token, found in entry.items():
            assert found.logprob == pytest.approx(expected[row, token].item(), abs=1e-12)
        order = expected[row].argsort(descending=True).tolist()
        assert {token for token, found in entry.items() if found.rank <= 5} == set(order[:5])
        assert all(order[found.rank - 1] == token for token, found in entry.items())


def test_the_chosen_token_comes_first_and_is_not_repeated():
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0]])
    assert list(token_logprobs(logits, [0], 2)[0]) == [0, 1, 2]
    assert list(token_logprobs(logits, [2], 2)[0]) == [2, 1]
    assert token_logprobs(logits, [0], 2)[0][0].rank == 4
    assert list(token_logprobs(logits, [3], 0)[0]) == [3]


def test_equal_logits_rank_by_id():
    entry = token_logprobs(torch.zeros(1, 6), [4], 3)[0]
    assert {token: found.rank for token, found in entry.items()} == {4: 5, 0: 1, 1: 2, 2: 3}


def test_more_than_the_vocabulary_is_all_of_it():
    entry = token_logprobs(torch.tensor([[0.0, 1.0, -math.inf]]), [1], 20)[0]
    assert {token: found.rank for token, found in entry.items()} == {1: 1, 0: 2, 2: 3}
    assert entry[2].logprob == -math.inf


def test_a_rows_logprobs_do_not_depend_on_the_rows_beside_it():
    logits = torch.from_numpy(np.random.default_rng(1).standard_normal((9, 1001)).astype(np.float32))
    chosen = list(range(9))
    together = token_logprobs(logits, chosen, 20)
    assert together == [token_logprobs(logits[i : i + 1], [i], 20)[0] for i in range(9)]
