"""The experts of steps of more than 16 rows give every row the bits of narrower steps, whoever chose what."""

import dataclasses

import pytest
import torch

from lean_laguna.kernels.cuda import products, wide_experts
from lean_laguna.kernels.triton.experts import Routing
from lean_laguna.kernels.triton.launch import MAX_ROWS, WIDE, Launch
from lean_laguna.kernels.triton.weights import SparseWeights
from support import kernel_twins as plain

EPS = 1e-6


def mixture(draw, d, f, experts, top_k):
    return SparseWeights(
        norm=draw(d, scale=0.2) + 1,
        router_gate_up=draw(experts + 2 * f, d, scale=d**-0.5),
        bias=draw(experts, scale=0.3, of=torch.float32),
        gate_up=draw(experts, 2 * f, d, scale=d**-0.5),
        down=draw(experts, d, f, scale=f**-0.5),
        shared_down=draw(d, f, scale=f**-0.5),
        top_k=top_k,
        scaling=2.5,
        softcap=0.0,
        norm_topk=True,
    )


class Step:
    """A MoE block's buffers, and what it makes of rows sixteen at a time and all at once."""

    def __init__(self, mlp, poisoned, device):
        (experts, self.d, self.f), top_k = mlp.down.shape, mlp.top_k
        self.mlp, self.poisoned, self.device = mlp, poisoned, device
        slots = max(min(experts, WIDE * top_k), 4 * top_k)
        self.routing = Routing(
            act=poisoned(slots, WIDE, self.f),
            slot_weights=poisoned(max(slots, 32), WIDE, of=torch.float32),
            slot_experts=torch.zeros(slots, dtype=torch.int32, device=device),
            num_slots=torch.zeros(1, dtype=torch.int32, device=device),
            expert_ids=torch.full((MAX_ROWS, top_k), -1, dtype=torch.int32, device=device),
        )
        self.scores, self.normed = poisoned(MAX_ROWS, experts), poisoned(MAX_ROWS, self.d)

    def count(self, n):
        return torch.tensor([n], dtype=torch.int32, device=self.device)

    def narrow(self, rows):
        """Return the rows' results and expert ids, and keep their scores and normed rows."""
        results, ids = rows.clone(), []
        for first in range(0, len(rows), WIDE):
            live = min(WIDE, len(rows) - first)
            hidden, scores, normed = (
                self.poisoned(MAX_ROWS, n) for n in (self.d, len(self.mlp.bias), self.d)
            )
            hidden[:live] = rows[first : first + live]
            buffers = (scores, normed, self.poisoned(MAX_ROWS, self.f), self.routing)
            products.run_experts(self.mlp, hidden, *buffers, self.count(live), EPS, Launch(WIDE))
            results[first : first + live] = hidden[:live]
            self.scores[first : first + live], self.normed[first : first + live] = (
                scores[:live],
                normed[:live],
            )
            ids.append(self.routing.expert_ids[:live].clone())
        return results, torch.cat(ids)

    def wide(self, rows, tap=None):
        hidden = self.poisoned(MAX_ROWS, self.d)
        hidden[: len(rows)] = rows
        buffers = (self.scores, self.normed, self.poisoned(MAX_ROWS, self.f), self.routing)
        wide_experts.run(self.mlp, hidden, *buffers, self.count(len(rows)), Launch(64), tap)
        return hidden, self.routing.expert_ids[: len(rows)].clone()


def assert_same_bits(mlp, rows, poisoned, device):
    """Return the results, the chosen experts and how many rows the most chosen one has."""
    step = Step(mlp, poisoned, device)
    assert wide_experts.fits(mlp)
    expected, ids = step.narrow(rows)
    taps = poisoned(MAX_ROWS, 2, step.d)
    hidden, found = step.wide(rows, taps[:, 1])
    assert torch.equal(found, ids)
    assert torch.equal(hidden[: len(rows)].view(torch.int16), expected.view(torch.int16))
    assert torch.equal(taps[: len(rows), 1], hidden[: len(rows)])
    assert hidden[len(rows) :].isnan().all()
    assert taps[:, 0].isnan().all()
    return expected, ids, int(torch.bincount(ids.flatten().long()).max())


@pytest.mark.parametrize(("live", "d"), [(19, 512), (64, 256)])
def test_rows_have_the_bits_of_narrower_steps(draw, poisoned, device, live, d):
    mlp, rows = mixture(draw, d, d, 32, 3), draw(live, d)
    assert_same_bits(mlp, rows, poisoned, device)


def test_wide_steps_equal_their_twin(draw, poisoned, device):
    mlp, rows = mixture(draw, 256, 256, 32, 3), draw(24, 256)
    step = Step(mlp, poisoned, device)
    step.narrow(rows)
    x = plain.rms_norm(rows, mlp.norm, EPS)
    weights, ids = plain.route(plain.linear(x, mlp.router_gate_up[:32]), mlp.bias, 3)
    routed = plain.moe(x, mlp.gate_up, mlp.down, weights, ids).to(rows.dtype) * mlp.scaling
    shared = plain.linear(plain.silu_and_mul(plain.linear(x, mlp.router_gate_up[32:])), mlp.shared_down)
    hidden, found = step.wide(rows)
    assert torch.equal(found.long(), ids)
    torch.testing.assert_close(hidden[:24], rows + (routed + shared), atol=6e-2, rtol=3e-2)


def test_an_expert_takes_all_rows(draw, poisoned, device):
    mlp, rows = mixture(draw, 256, 256, 32, 3), draw(64, 256)
    mlp = dataclasses.replace(mlp, bias=torch.zeros(32, device=device))
    mlp.bias[[7, 30, 2]] = torch.tensor([4.0, 3.0, 2.0], device=device)
    _, ids, most = assert_same_bits(mlp, rows, poisoned, device)
    assert ids.tolist() == [[7, 30, 2]] * 64
    assert most == 64


def test_every_row_has_an_expert_of_its_own(draw, poisoned, device):
    mlp, rows = mixture(draw, 256, 256, 64, 1), draw(64, 256)
    order = torch.randperm(64, device=device)
    # Random rows are all but orthogonal.
    mlp.router_gate_up[order] = plain.rms_norm(rows, mlp.norm, EPS) / 64
    mlp = dataclasses.replace(mlp, bias=torch.zeros(64, device=device), norm_topk=False, softcap=3.0)
    _, ids, most = assert_same_bits(mlp, rows, poisoned, device)
    assert ids[:, 0].tolist() == order.tolist()
    assert most == 1


def test_equal_scores_go_to_the_lower_expert(draw, poisoned, device):
    mlp, rows = mixture(draw, 256, 256, 32, 3), draw(17, 256)
    mlp.router_gate_up[:32] = 0
    mlp = dataclasses.replace(mlp, bias=torch.zeros(32, device=device))
    _, ids, _ = assert_same_bits(mlp, rows, poisoned, device)
    assert ids.tolist() == [[0, 1, 2]] * 17


def test_a_wide_step_of_no_rows_writes_nothing(draw, poisoned, device):
    step = Step(mixture(draw, 256, 256, 32, 3), poisoned, device)
    hidden, _ = step.wide(draw(0, 256))
    assert hidden.isnan().all()
    assert (step.routing.expert_ids == -1).all()
    assert step.routing.act.isnan().all()


def of_shape(d, f, experts, top_k, shared=None):
    def empty(*size, of=torch.bfloat16, scale=1.0):
        return torch.empty(size, dtype=of, device="meta")

    mlp = mixture(empty, d, f, experts, top_k)
    return dataclasses.replace(mlp, shared_down=empty(d, shared or f))


@pytest.mark.parametrize("room", [232_448, 166_912])
def test_what_fits_keeps_to_the_shared_memory_of_a_card(monkeypatch, room):
    found = []
    monkeypatch.setattr(wide_experts, "launch_kernel", lambda *args: found.append((args[0].name, args[3])))
    monkeypatch.setattr(wide_experts, "shared_memory", lambda device: room)
    mlp = of_shape(2048, 512, 256, 8)
    step = Step(mlp, lambda *size, of=torch.bfloat16: torch.empty(size, dtype=of, device="meta"), "meta")
    assert wide_experts.fits(mlp)
    step.wide(step.scores.new_empty(64, 2048))
    assert [name for name, _ in found] == ["wide_route", "wide_up", "wide_down"]
    assert all(size <= room for _, size in found)


def test_shapes_of_other_kernels_do_not_fit(monkeypatch):
    assert not wide_experts.fits(of_shape(3072, 1024, 256, 10))
    assert not wide_experts.fits(of_shape(2048, 512, 256, 8, shared=1024))
    monkeypatch.setattr(wide_experts, "shared_memory", lambda device: 65_536)
    assert not wide_experts.fits(of_shape(2048, 512, 256, 8))
    monkeypatch.undo()
    monkeypatch.setattr(wide_experts, "has_bulk_copies", lambda device: False)
    assert not wide_experts.fits(of_shape(2048, 512, 256, 8))
