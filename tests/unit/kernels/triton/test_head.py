"""The head's token is the argmax of scaled logits plus Philox noise, ties to the lower id."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; it comes with PyTorch's CUDA builds")

from lean_laguna.kernels.triton import head
from lean_laguna.kernels.triton.head import sample, write_logits
from lean_laguna.kernels.triton.launch import Launch, Tile

V, D = 83, 32
TILE = Tile(16, 16, split=1, warps=1, stages=2)


def philox(key, counter):
    """Philox4x32-10 of Salmon et al. 2011 on Python integers."""
    mask, (k0, k1), c = 0xFFFFFFFF, key, list(counter)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k0, p1 & mask, (p0 >> 32) ^ c[3] ^ k1, p0 & mask]
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return c


def gumbel(seed, position, vocab):
    key = (seed & 0xFFFFFFFF, seed >> 32)
    words = [w for group in range(-(-vocab // 4)) for w in philox(key, (group, position, 0, 0))]
    v = (np.array(words[:vocab], dtype=np.float64) + 0.5) * 2.0**-32
    return -np.log(-np.log1p(-v))


def test_philox_gives_the_published_vectors():
    assert philox((0, 0), (0, 0, 0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = 0xFFFFFFFF
    assert philox((ones, ones), (ones,) * 4) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.fixture
def run(draw, poisoned, count, device):
    def call(
        x,
        weight,
        temperatures,
        *,
        seeds=None,
        rows=3,
        offset=1,
        draft_rows=None,
        tokens=None,
        cols=16,
        given=None,
    ):
        tokens = torch.full((16,), -7, dtype=torch.int32, device=device) if tokens is None else tokens
        logits = poisoned(16, V, of=torch.float32)
        parts = -(-V // 16)
        sample(
            x,
            weight,
            tokens,
            torch.zeros(16, dtype=torch.int64, device=device) if seeds is None else seeds,
            torch.tensor(temperatures + [0.0] * (16 - len(temperatures)), device=device),
            torch.arange(100, 116, dtype=torch.int32, device=device),
            count(rows),
            (poisoned(parts, 16, of=torch.float32), torch.zeros(parts, 16, dtype=torch.int32, device=device)),
            TILE,
            Launch(cols=cols),
            position_offset=offset,
            logits=logits,
            draft_rows=draft_rows,
            given=given,
        )
        return tokens, logits

    return call


def test_greedy_takes_the_first_of_the_highest(run, draw, plain, tolerance, device):
    x, weight = draw(16, D), draw(V, D)
    weight[60] = weight[9] = 3 * x[1]
    tokens, logits = run(x, weight, [])
    torch.testing.assert_close(
        logits[:3], plain.linear(x, weight)[:3].float(), atol=30 * tolerance, rtol=tolerance
    )
    assert tokens[:3].tolist() == logits[:3].argmax(-1).tolist()
    assert tokens[1] == 9
    assert (tokens[3:] == -7).all()


def test_sampling_adds_the_noise_of_seed_position_and_token(run, draw, device):
    x, weight = draw(16, D), draw(V, D, scale=0.1)
    seeds = torch.tensor([5, 2**40 + 3, 9] + [0] * 13, dtype=torch.int64, device=device)
    tokens, logits = run(x, weight, [0.7, 1.3, 0.0], seeds=seeds)
    for row, temperature in ((0, 0.7), (1, 1.3)):
        noisy = logits[row].double().cpu().numpy() / temperature + gumbel(seeds[row].item(), 101 + row, V)
        assert tokens[row] == noisy.argmax()
    assert tokens[2] == logits[2].argmax()


def test_a_drafter_keeps_each_requests_anchor(run, draw, count, device):
    row_start, row_request = count(0, 2, *[0] * 14), count(0, 0, 1, 1, *[0] * 12)
    tokens = torch.full((16,), 77, dtype=torch.int32, device=device)
    x, weight = draw(16, D), draw(V, D)
    weight[77] = 0
    tokens, _ = run(x, weight, [], rows=4, offset=0, draft_rows=(row_start, row_request), tokens=tokens)
    assert tokens[0] == tokens[2] == 77
    assert 77 not in (tokens[1], tokens[3])


@pytest.mark.parametrize("cols", [8, 16])
def test_a_rows_logits_and_token_do_not_depend_on_its_neighbours(run, draw, device, assert_same_bits, cols):
    weight, row = draw(V, D), draw(D)
    _, alone = run(row.expand(16, D).contiguous(), weight, [], rows=1, cols=cols)
    for rows in range(1, cols + 1, 3):
        x = draw(16, D, scale=40.0)
        x[rows - 1] = row
        _, logits = run(x, weight, [], rows=rows, cols=cols)
        assert_same_bits(logits[rows - 1], alone[0])


def test_columns_in_groups_choose_what_they_choose_in_one(
    run, draw, poisoned, count, device, assert_same_bits
):
    x, weight = draw(64, D), draw(V, D)
    parts, logits = -(-V // 16), poisoned(64, V, of=torch.float32)
    tokens = torch.full((64,), -7, dtype=torch.int32, device=device)
    sample(
        x,
        weight,
        tokens,
        torch.zeros(64, dtype=torch.int64, device=device),
        torch.tensor([0.0, 0.9] * 32, device=device),
        torch.arange(64, dtype=torch.int32, device=device) % 16 + 100,
        count(45),
        (poisoned(parts, 64, of=torch.float32), torch.zeros(parts, 64, dtype=torch.int32, device=device)),
        TILE,
        Launch(cols=64),
        position_offset=1,
        logits=logits,
    )
    assert tokens[45:].tolist() == [-7] * 19
    assert logits[45:].isnan().all()
    for start in (0, 32):
        own, found = run(x[start : start + 16].contiguous(), weight, [0.0, 0.9] * 8, rows=13)
        torch.testing.assert_close(logits[start : start + 13], found[:13])
        assert torch.equal(tokens[start : start + 13], own[:13])


@pytest.mark.parametrize("cols", [1, 8, 16])
def test_a_product_made_elsewhere_is_chosen_among_alike(
    run, draw, poisoned, count, plain, device, assert_same_bits, cols, monkeypatch
):
    monkeypatch.setattr(head, "GIVEN_BLOCK", 32)  # three programs
    x, weight, live = draw(16, D), draw(V, D), min(cols, 3)
    temperatures = [0.8, 0.0, 1.2][:live]
    made = poisoned(16, V, of=torch.float32)
    write_logits(x, weight, made, count(live), TILE, Launch(cols=cols))
    given = made.to(x.dtype)  # each logit is of that precision
    right, expected = run(x, weight, temperatures, rows=live, cols=cols)
    tokens, logits = run(x, torch.full_like(weight, 7.0), temperatures, rows=live, cols=cols, given=given)
    assert torch.equal(tokens, right)
    assert_same_bits(logits[:live], expected[:live])
    assert logits[live:].isnan().all()
    alone = poisoned(16, V, of=torch.float32)
    write_logits(x, weight, alone, count(live), TILE, Launch(cols=cols), given=given)
    assert_same_bits(alone[:live], expected[:live])
