"""Routed experts equal their plain twin, read only live experts, and keep every row's bits its own."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; it comes with PyTorch's CUDA builds")

from lean_laguna.kernels.triton.expert_down import expert_down
from lean_laguna.kernels.triton.experts import Routing, expert_gate_up
from lean_laguna.kernels.triton.launch import Launch, Tile

D, F, FS, E, A = 48, 24, 40, 10, 3
TILE = Tile(16, 16, split=2, warps=2, stages=2)


@pytest.fixture
def bank(draw, device):
    return {
        "gate_up": draw(E, 2 * F, D, scale=D**-0.5),
        "down": draw(E, D, F, scale=F**-0.5),
        "shared_down": draw(D, FS, scale=FS**-0.5),
        "bias": draw(E, scale=0.3, of=torch.float32),
    }


def empty_routing(poisoned, device):
    slots = min(E, 16 * A)
    return Routing(
        act=poisoned(slots, 16, F),
        slot_weights=poisoned(slots, 16, of=torch.float32),
        slot_experts=torch.full((slots,), -1, dtype=torch.int32, device=device),
        num_slots=torch.full((1,), -1, dtype=torch.int32, device=device),
        expert_ids=torch.full((16, A), -1, dtype=torch.int32, device=device),
    )


def run(bank, routing, normed, scores, shared_act, hidden, num_rows, programs=5):
    launch = Launch(programs=programs)
    expert_gate_up(normed, scores, bank["bias"], bank["gate_up"], routing, num_rows, TILE, launch, top_k=A)
    expert_down(
        routing,
        bank["down"],
        hidden,
        num_rows,
        TILE,
        launch,
        scaling=2.5,
        shared_act=shared_act,
        shared_weight=bank["shared_down"],
    )


@pytest.mark.parametrize("rows", [1, 6, 16])
def test_experts_equal_their_twin(plain, draw, poisoned, count, tolerance, bank, device, rows):
    normed, scores, shared_act, hidden = draw(16, D), draw(16, E), draw(16, FS), draw(16, D)
    weights, ids = plain.route(scores, bank["bias"], A)
    routed = plain.moe(normed, bank["gate_up"], bank["down"], weights, ids).to(normed.dtype)
    mlp = (routed.float() * 2.5).to(normed.dtype).float() + plain.linear(
        shared_act, bank["shared_down"]
    ).float()
    expected = (hidden.float() + mlp.to(normed.dtype).float()).to(normed.dtype)
    before, routing = hidden.clone(), empty_routing(poisoned, device)
    run(bank, routing, normed, scores, shared_act, hidden, count(rows))
    torch.testing.assert_close(hidden[:rows], expected[:rows], atol=4 * tolerance, rtol=4 * tolerance)
    assert torch.equal(hidden[rows:], before[rows:])
    assert torch.equal(routing.expert_ids[:rows].long(), ids[:rows])
    live = ids[:rows].unique()
    assert routing.num_slots.item() == len(live)
    assert torch.equal(routing.slot_experts[: len(live)].long(), live)


def test_equal_scores_go_to_the_lower_expert(draw, poisoned, count, bank, device):
    scores = torch.zeros(16, E, device=device, dtype=bank["down"].dtype)
    scores[1, 4:] = 1.0
    routing = empty_routing(poisoned, device)
    bank["bias"].zero_()
    run(bank, routing, draw(16, D), scores, draw(16, FS), draw(16, D), count(2))
    assert routing.expert_ids[:2].tolist() == [[0, 1, 2], [4, 5, 6]]


def test_the_bias_chooses_but_does_not_weigh(draw, poisoned, count, bank, device):
    bank["bias"].zero_()
    bank["bias"][[7, 8, 9]] = 5.0
    routing, scores = empty_routing(poisoned, device), draw(16, E)
    run(bank, routing, draw(16, D), scores, draw(16, FS), draw(16, D), count(1))
    assert sorted(routing.expert_ids[0].tolist()) == [7, 8, 9]
    sigmoid = torch.sigmoid(scores[0, 7:].float())
    got = routing.slot_weights[:3, 0]
    torch.testing.assert_close(got, sigmoid / sigmoid.sum(), atol=1e-2, rtol=1e-2)


def test_a_row_has_the_same_bits_for_every_number_of_rows_slot_and_neighbour(
    draw, poisoned, count, bank, device, assert_same_bits
):
    row = [draw(1, n) for n in (D, E, FS, D)]
    alone = [r.expand(16, -1).contiguous() for r in row]
    run(bank, empty_routing(poisoned, device), *alone, count(1))
    for rows in (2, 5, 8, 9, 16):
        slot = rows - 1
        state = [draw(16, n, scale=s) for n, s in ((D, 9.0), (E, 3.0), (FS, 9.0), (D, 9.0))]
        for full, own in zip(state, row, strict=True):
            full[slot] = own
        run(bank, empty_routing(poisoned, device), *state, count(rows), programs=7)
        assert_same_bits(state[3][slot], alone[3][0])


def test_halves_of_the_columns_leave_what_all_leave(
    draw, poisoned, count, tolerance, bank, device, assert_same_bits, monkeypatch
):
    state = [draw(16, n) for n in (D, E, FS, D)]
    halved = [part.clone() for part in state]
    run(bank, empty_routing(poisoned, device), *state, count(13))
    monkeypatch.setattr("lean_laguna.kernels.triton.expert_down.shared_memory", lambda device: 0)
    run(bank, empty_routing(poisoned, device), *halved, count(13))
    if device == "cuda":
        assert_same_bits(halved[3], state[3])
    # The interpreter's products are numpy's, whose sums follow the width.
    torch.testing.assert_close(halved[3], state[3], atol=4 * tolerance, rtol=4 * tolerance)
