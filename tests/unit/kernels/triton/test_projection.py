"""Projections equal their plain twins on odd sizes, and a row's bits are its own."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; it comes with PyTorch's CUDA builds")

from lean_laguna.kernels.triton.launch import Launch, Tile
from lean_laguna.kernels.triton.projection import gate_up, project

EPS = 1e-6
TILES = [Tile(16, 16, split=2, warps=2, stages=2), Tile(16, 16, split=1, warps=1, stages=2)]


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("n", "k", "rows", "cols"), [(50, 72, 5, 8), (33, 64, 11, 16), (33, 64, 45, 64)])
def test_projection_equals_its_twin(plain, draw, poisoned, count, tolerance, tile, n, k, rows, cols):
    x, weight, norm = draw(64, k), draw(n, k, scale=k**-0.5), draw(k) + 1
    out = poisoned(64, n)
    project(x, weight, out, count(rows), tile, Launch(cols=cols), norm=norm, eps=EPS)
    expected = plain.linear(plain.rms_norm(x, norm, EPS), weight)
    torch.testing.assert_close(out[:rows], expected[:rows], atol=tolerance, rtol=tolerance)
    assert out[rows:].isnan().all()


@pytest.mark.parametrize(("rows", "cols"), [(7, 16), (40, 64)])
def test_projection_adds_to_the_residual_in_place_and_taps_the_sum(
    plain, draw, poisoned, count, tolerance, rows, cols
):
    x, weight, hidden = draw(64, 48), draw(40, 48, scale=0.1), draw(64, 40)
    taps, before = poisoned(64, 3, 40), hidden.clone()
    expected = (hidden.float() + plain.linear(x, weight).float()).to(x.dtype)
    project(x, weight, hidden, count(rows), TILES[0], Launch(cols), residual=hidden, tap=taps[:, 1])
    torch.testing.assert_close(hidden[:rows], expected[:rows], atol=tolerance, rtol=tolerance)
    assert torch.equal(hidden[rows:], before[rows:])
    assert torch.equal(taps[:rows, 1], hidden[:rows])
    assert taps[:, [0, 2]].isnan().all()


def test_each_part_of_the_weight_may_have_its_own_norm(plain, draw, poisoned, count, tolerance):
    x, weight, norms = draw(16, 32), draw(96, 32, scale=0.2), draw(3, 32) + 1
    out = poisoned(16, 96)
    project(x, weight, out, count(4), TILES[0], Launch(), norm=norms, eps=EPS)
    for part in range(3):
        own = slice(part * 32, part * 32 + 32)
        expected = plain.linear(plain.rms_norm(x, norms[part], EPS), weight[own])
        torch.testing.assert_close(out[:4, own], expected[:4], atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("experts", "width"), [(0, 36), (10, 20)])
def test_gate_up_equals_its_twin_beside_the_router(plain, draw, poisoned, count, tolerance, experts, width):
    k, rows = 72, 5
    x, norm, weight = draw(16, k), draw(k) + 1, draw(experts + 2 * width, k, scale=k**-0.5)
    act, scores, normed = poisoned(16, width), poisoned(16, max(1, experts)), poisoned(16, k)
    extra = {"scores": scores, "normed": normed} if experts else {}
    gate_up(x, norm, weight, act, count(rows), EPS, TILES[0], Launch(cols=8), **extra)
    x_normed = plain.rms_norm(x, norm, EPS)[:rows]
    both = plain.linear(x_normed, weight)
    torch.testing.assert_close(
        act[:rows], plain.silu_and_mul(both[:, experts:]), atol=tolerance, rtol=tolerance
    )
    assert act[rows:].isnan().all()
    if experts:
        torch.testing.assert_close(scores[:rows], both[:, :experts], atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(normed[:rows], x_normed, atol=tolerance, rtol=tolerance)
        assert normed[rows:].isnan().all()


def test_a_row_has_the_same_bits_for_every_number_of_rows_slot_and_neighbour(
    draw, poisoned, count, assert_same_bits
):
    weight, norm, row = draw(48, 64, scale=0.2), draw(64) + 1, draw(64)
    alone = poisoned(16, 48)
    project(row.expand(16, 64).contiguous(), weight, alone, count(1), TILES[0], Launch(), norm=norm, eps=EPS)
    for rows in range(1, 17):
        slot = rows - 1
        x = draw(16, 64, scale=30.0)
        x[slot] = row
        out = poisoned(16, 48)
        project(x, weight, out, count(rows), TILES[0], Launch(), norm=norm, eps=EPS)
        assert_same_bits(out[slot], alone[0])
