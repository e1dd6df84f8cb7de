"""The experts of a chunk equal plain ones; a row's bits do not follow the rows beside it."""

import pytest
import torch

from lean_laguna.kernels.cuda import prompt_experts as module
from lean_laguna.kernels.cuda.prompt_experts import TILE_ROWS, chunk_down, chunk_up, fits_prompt_experts
from lean_laguna.kernels.triton.prefill_sort import ExpertSort
from support.kernel_twins import linear, silu_and_mul

A, E, D, F = 2, 3, 256, 128


def sorted_by_expert(chosen, weights):
    """Return what ``sort_by_expert`` leaves of each token's experts, ascending."""
    pairs = torch.argsort(chosen.flatten(), stable=True).to(torch.int32)
    sort = ExpertSort.allocate(max(chosen.shape[0], 16), experts=E, top_k=A, device=chosen.device)
    tiles, end = [], 0
    for e in range(E):
        start, end = end, end + int((chosen == e).sum())
        tiles += [(e, at, min(at + TILE_ROWS, end)) for at in range(start, end, TILE_ROWS)]
    sort.pairs[: len(pairs)] = pairs
    sort.weights[: len(pairs)] = weights.flatten()
    sort.tiles[:, : len(tiles)] = torch.tensor(tiles, dtype=torch.int32, device=chosen.device).T
    sort.num_tiles.fill_(len(tiles))
    return sort


class Scene:
    """Weights, and tokens with experts of their own: many take the first two, few the last."""

    def __init__(self, rows, draw, device):
        self.x, self.gate_up, self.down = (
            draw(rows, D),
            draw(E, 2 * F, D, scale=0.1),
            draw(E, D, F, scale=0.1),
        )
        first = torch.arange(rows, device=device) % 7 == 0
        self.chosen = torch.stack((first.int() * 1, 2 - (~first).int()), 1).sort(1)[0]
        self.weights = torch.rand(rows, A, device=device)

    def run(self, first, end, poisoned, width=D):
        sort = sorted_by_expert(self.chosen[first:end], self.weights[first:end])
        n = end - first
        act = poisoned(n * A, F)
        chunk_up(self.x[first:end], self.gate_up, sort, act, top_k=A)
        parts = []
        for at in range(0, D, width):
            terms = poisoned(n * A, width)
            chunk_down(act, self.down, sort, terms, at)
            parts.append(terms)
        return torch.cat(parts, 1).view(n, A, D)

    def expected(self):
        found = []
        for x, experts, weights in zip(self.x, self.chosen.tolist(), self.weights, strict=True):
            for e, weight in zip(experts, weights, strict=True):
                act = silu_and_mul(linear(x[None], self.gate_up[e]))
                found.append(((act.float() @ self.down[e].float().T) * weight).to(x.dtype))
        return torch.cat(found).view(-1, A, D)


@pytest.mark.parametrize("rows", [330, 5])
def test_terms_equal_plain_experts(draw, poisoned, device, rows):
    scene = Scene(rows, draw, device)
    torch.testing.assert_close(scene.run(0, rows, poisoned), scene.expected(), atol=2e-2, rtol=2e-2)


def test_a_row_keeps_its_bits_beside_others(draw, poisoned, device, monkeypatch):
    scene = Scene(300, draw, device)
    whole = scene.run(0, 300, poisoned)
    monkeypatch.setattr(module, "multiprocessors", lambda device: 4)
    parts = [scene.run(first, first + 100, poisoned) for first in (0, 100, 200)]
    assert torch.equal(torch.cat(parts), whole)


def test_what_fits(draw):
    assert fits_prompt_experts(draw(E, 2 * F, D), draw(E, D, F))
    assert not fits_prompt_experts(draw(E, 2 * F, D).float(), draw(E, D, F).float())
    assert not fits_prompt_experts(draw(E, 96, D), draw(E, D, 48))
    assert not fits_prompt_experts(None, draw(E, D, F))
