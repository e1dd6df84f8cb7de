import pytest
import torch

from lean_laguna.models.dense_attention import make_attend, reset_positions


def naive(q, k, v, positions, documents, window):
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    at = torch.arange(q.shape[2])
    hidden = (at[None, :] > at[:, None])[None]
    hidden = hidden | (documents[:, :, None] != documents[:, None, :])
    if window is not None:
        hidden = hidden | (positions[:, :, None] - positions[:, None, :] >= window)
    scores = (q @ k.transpose(2, 3)) * q.shape[-1] ** -0.5
    return scores.masked_fill(hidden[:, None], float("-inf")).softmax(-1) @ v


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("packed", [False, True])
def test_rows_see_their_document_their_past_and_their_window(window, packed, generator):
    q = torch.randn(2, 6, 11, 8, generator=generator)
    k, v = (torch.randn(2, 2, 11, 8, generator=generator) for _ in range(2))
    documents = torch.tensor([[0] * 4 + [1] * 7, [3] * 10 + [4]]) if packed else torch.zeros(2, 11).long()
    positions = reset_positions(documents)
    attend = make_attend(positions, documents if packed else None, window)
    expected = naive(q, k, v, positions, documents, window)
    torch.testing.assert_close(attend(q, k, v), expected, rtol=1e-5, atol=1e-6)


def test_positions_begin_anew_with_each_document():
    documents = torch.tensor([[5, 5, 5, 2, 2, 5], [1, 1, 1, 1, 1, 1]])
    assert reset_positions(documents).tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]]
