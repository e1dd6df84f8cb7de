"""Experts of a chunk equal their twin however rows are spread; ties go to the lower id."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; it comes with PyTorch's CUDA builds")

from lean_laguna.engine.gpu_packed import to_kernels
from lean_laguna.kernels.triton.launch import cdiv
from lean_laguna.kernels.triton.prefill_experts import expert_chunk_down, expert_chunk_up
from lean_laguna.kernels.triton.prefill_rows import combine, norm_rows
from lean_laguna.kernels.triton.prefill_sort import ExpertSort, sort_by_expert
from lean_laguna.kernels.triton.prefill_tiles import ExpertTile
from lean_laguna.kernels.triton.prefill_words import takes_words
from lean_laguna.quant.codec import encode, to_packed
from lean_laguna.quant.packed import bank
from lean_laguna.quant.scheme import FP8_CHANNEL, NVFP4, packed_integer

E, A, D, F = 5, 2, 40, 24


@pytest.fixture
def dtype(device):
    return torch.bfloat16 if device == "cuda" else torch.float32


def sorted_rows(scores, bias, rows, num_tokens, tile):
    sort = ExpertSort.allocate(rows, experts=E, top_k=A, device=scores.device)
    sort.pairs.fill_(-1)
    sort.weights.fill_(float("nan"))
    length = torch.tensor([num_tokens], dtype=torch.int32, device=scores.device)
    sort_by_expert(scores, bias, sort, rows, length, tile, top_k=A)
    return sort


@pytest.mark.parametrize(("favourite", "halves", "columns"), [(0.0, False, D), (9.0, True, 24)])
def test_experts_equal_their_twin(plain, draw, poisoned, count, device, dtype, favourite, halves, columns):
    rows, n, tile = 64, 41, ExpertTile(32, 16, 32, 16, 4, 4, 2, 2, halves=halves)
    scores, bias = poisoned(rows, E + 3), draw(E, of=torch.float32)
    scores[:n] = draw(n, E + 3)
    scores[:n, 1] += favourite
    x, up, down = poisoned(rows, D), draw(E, 2 * F, D, scale=0.2), draw(E, D, F, scale=0.2)
    x[:n] = draw(n, D)
    act = poisoned(rows * A, F)
    sort = sorted_rows(scores, bias, rows, n, tile)
    num_tiles = cdiv(rows * A, tile.rows) + E
    expert_chunk_up(x, up, sort, act, num_tiles, tile, top_k=A)
    shared, hidden = draw(n, D), draw(n, D)
    found, tap = hidden.clone(), poisoned(n, 2, D)
    for at in range(0, D, columns):
        terms = poisoned(rows * A, min(columns, D - at))
        expert_chunk_down(act, down, sort, terms, num_tiles, tile, at)
        combine(found, terms.view(rows, A, -1), shared, count(n), at, scaling=2.5, tap=tap[:, 1])
        assert terms.view(rows, A, -1)[n:].isnan().all()

    weights, ids = plain.route(scores[:n, :E], bias, A)
    routed = plain.moe(x[:n], up, down, weights, ids).to(dtype)
    expected = hidden + (routed * 2.5 + shared)
    bound = 2e-5 if dtype == torch.float32 else 6e-2
    torch.testing.assert_close(found, expected, atol=bound, rtol=bound)
    assert torch.equal(tap[:, 1], found)


def test_rows_are_normalised_in_place_each_by_its_weight(plain, draw, count, device, tolerance):
    x, weights = draw(6, D), draw(3, D)
    found = x.clone()
    norm_rows(found, weights, found, count(5), 1e-6)
    for i in range(5):
        want = plain.rms_norm(x[i : i + 1], weights[i % 3], 1e-6)
        torch.testing.assert_close(found[i : i + 1], want, atol=tolerance, rtol=tolerance)
    assert torch.equal(found[5], x[5])


def test_pairs_lie_by_expert_then_token_and_ties_go_to_the_lower_id(device, dtype):
    scores = torch.zeros(32, E, dtype=dtype, device=device)
    scores[3:6, 4] = 1
    tile = ExpertTile(16, 16, 16, 16, 4, 4, 2, 2)
    sort = sorted_rows(scores, torch.zeros(E, device=device), 32, 19, tile)
    chosen = [[0, 4] if 3 <= row < 6 else [0, 1] for row in range(19)]
    want = [row * A + chosen[row].index(e) for e in range(E) for row in range(19) if e in chosen[row]]
    assert sort.pairs[: len(want)].tolist() == want
    assert (sort.pairs[len(want) :] == -1).all()
    count = sort.num_tiles.item()
    assert sort.tiles[:, :count].T.tolist() == [[0, 0, 16], [0, 16, 19], [1, 19, 35], [4, 35, 38]]


SMALL = (32, 48, ExpertTile(16, 16, 16, 32, 4, 4, 2, 2))
BY_WORDS = (128, 256, ExpertTile(32, 64, 128, 128, 4, 4, 2, 2, halves=True))


@pytest.mark.parametrize(
    ("scheme", "shape"),
    [
        (NVFP4, SMALL),
        (packed_integer(4, 16, symmetric=False), SMALL),
        (FP8_CHANNEL, SMALL),
        (NVFP4, BY_WORDS),
        (FP8_CHANNEL, BY_WORDS),
    ],
)
def test_packed_experts_equal_the_decoded_bank(draw, poisoned, device, dtype, tolerance, scheme, shape):
    rows, n, (width, hidden, tile) = 32, 21, shape

    def packed_bank(height, columns):
        weights = [draw(height, columns, of=torch.float32) * columns**-0.5 for _ in range(E)]
        encoded = [to_packed(encode(w, scheme), scheme, tuple(w.shape)) for w in weights]
        return bank([weight.to(device) for weight in encoded])

    banks, x = [packed_bank(2 * width, hidden), packed_bank(hidden, width)], draw(rows, hidden)
    sort = sorted_rows(draw(rows, E), torch.zeros(E, device=device), rows, n, tile)
    num_tiles, found = cdiv(rows * A, tile.rows) + E, []
    for up, down in ([to_kernels(b, dtype) for b in banks], [b.decode(dtype) for b in banks]):
        act, terms = poisoned(rows * A, width), poisoned(rows * A, hidden)
        expert_chunk_up(x, up, sort, act, num_tiles, tile, top_k=A)
        expert_chunk_down(act, down, sort, terms, num_tiles, tile)
        found.append(terms)
    assert takes_words(to_kernels(banks[0], dtype), tile.up, tile.block_k) == (shape is BY_WORDS)
    torch.testing.assert_close(found[0][: n * A], found[1][: n * A], atol=4 * tolerance, rtol=4 * tolerance)
