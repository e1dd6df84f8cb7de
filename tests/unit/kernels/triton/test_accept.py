"""What is accepted, emitted and laid out for the next step: first event wins, finished requests rest."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; it comes with PyTorch's CUDA builds")

from lean_laguna.kernels.triton.accept import Requests, accept
from lean_laguna.kernels.triton.launch import Launch
from lean_laguna.kernels.triton.rows import Rows

EOS, MASK = 2, 12


def ints(device, values=()):
    return torch.tensor(list(values) + [0] * (16 - len(values)), dtype=torch.int32, device=device)


class State:
    """Requests in the middle of decoding, each with an anchor, drafts and what the target chose."""

    def __init__(self, device, blocks, remaining, num_drafts=3):
        counts = [len(ids) for ids, _ in blocks]
        starts = [sum(counts[:r]) for r in range(len(counts))]
        self.ids = ints(device, [t for ids, _ in blocks for t in ids])
        self.sampled = ints(device, [t for _, chosen in blocks for t in chosen])
        self.rows = Rows(
            ints(device, [sum(counts)])[:1],
            ints(device, [len(blocks)])[:1],
            ints(device, starts),
            ints(device, counts),
            ints(device, [r for r, n in enumerate(counts) for _ in range(n)]),
            ints(device, [100 * (r + 1) + i for r, n in enumerate(counts) for i in range(n)]),
        )
        self.seeds = torch.zeros(16, dtype=torch.int64, device=device)
        self.temperatures = torch.zeros(16, device=device)
        self.requests = Requests(
            remaining=ints(device, remaining),
            num_drafts=ints(device, [num_drafts] * len(blocks)),
            seeds=torch.arange(1000, 1016, device=device),
            temperatures=torch.arange(16, device=device) / 10,
            stop_ids=torch.tensor([[EOS, 24, -1]] * 16, dtype=torch.int32, device=device),
            ring=torch.full((16, 8), -1, dtype=torch.int32, device=device),
            emitted=ints(device, [6] * 16),
            accepted=ints(device),
            drafted=ints(device),
        )

    def step(self):
        accept(
            self.ids,
            self.sampled,
            self.rows,
            self.seeds,
            self.temperatures,
            self.requests,
            Launch(),
            mask_token=MASK,
        )
        return self

    def out(self, request):
        n = self.requests.emitted[request].item()
        return [self.requests.ring[request, i % 8].item() for i in range(6, n)]


def test_drafts_are_accepted_up_to_the_first_that_differs(device):
    state = State(device, [([50, 51, 52, 53], [51, 52, 99, 54])], [40]).step()
    assert state.out(0) == [51, 52, 99]
    assert state.requests.accepted[0] == 2
    assert state.requests.drafted[0] == 3
    assert state.requests.remaining[0] == 37
    assert state.ids[:5].tolist() == [99, MASK, MASK, MASK, MASK]
    assert state.rows.positions[:4].tolist() == [103, 104, 105, 106]
    assert state.rows.num_rows.item() == 4


def test_all_accepted_brings_a_bonus_token(device):
    state = State(device, [([50, 51, 52], [51, 52, 53])], [40]).step()
    assert state.out(0) == [51, 52, 53]
    assert state.requests.accepted[0] == 2


def test_a_stop_token_inside_the_block_ends_the_request_with_it(device):
    state = State(device, [([50, EOS, 52], [EOS, 52, 53])], [40]).step()
    assert state.out(0) == [EOS]
    assert state.requests.remaining[0] == 0
    assert state.rows.num_rows.item() == 0


def test_a_stop_token_that_is_not_reached_does_not_end_it(device):
    state = State(device, [([50, 51, 52], [60, EOS, 53])], [40]).step()
    assert state.out(0) == [60]
    assert state.requests.remaining[0] == 39


def test_the_length_limit_cuts_inside_the_block_and_shortens_the_last_drafts(device):
    assert State(device, [([50, 51, 52], [51, 52, 53])], [2]).step().out(0) == [51, 52]
    state = State(device, [([50, 51, 52], [51, 99, 53])], [4]).step()
    assert state.out(0) == [51, 99]
    assert state.rows.row_count[0] == 2


def test_requests_do_not_touch_each_other_and_finished_ones_rest(device):
    blocks = [([50, 51], [51, 7]), ([60], [24]), ([70, 71, 72], [80, 1, 1])]
    state = State(device, blocks, [9, 9, 9], num_drafts=1).step()
    assert [state.out(r) for r in range(3)] == [[51, 7], [24], [80]]
    assert state.rows.row_count[:3].tolist() == [2, 0, 2]
    assert state.rows.row_request[:4].tolist() == [0, 0, 2, 2]
    assert state.rows.positions[:4].tolist() == [102, 103, 301, 302]
    assert state.ids[:4].tolist() == [7, MASK, 80, MASK]
    assert state.seeds[:4].tolist() == [1000, 1000, 1002, 1002]
    torch.testing.assert_close(state.temperatures[:4].cpu(), torch.tensor([0.0, 0.0, 0.2, 0.2]))
    state.sampled[:4] = ints(device, [5, 6, 7, 8])[:4]
    state.step()
    assert state.out(1) == [24]
    assert state.rows.row_count[1] == 0


def test_synthetic_acceptance_is_that_of_the_host(device):
    import dataclasses

    from lean_laguna.spec.synthetic import SyntheticAcceptance

    synthetic = SyntheticAcceptance(((0.9, 0.6, 0.3), (0.5, 0.5, 0.1), (1.0, 0.0, 0.0)))
    drafts, chosen = [51, 52, 53], [61, 62, 63, 64]
    blocks = [([50, *drafts], chosen)] * 4
    counts = []
    for _ in range(3):
        state = State(device, blocks, [40] * 4)
        state.rows.positions.add_(7 * len(counts))
        thresholds = torch.tensor(synthetic.thresholds(16), dtype=torch.int64, device=device)
        state.requests = dataclasses.replace(state.requests, thresholds=thresholds)
        first = [100 * (r + 1) + 7 * len(counts) for r in range(4)]
        expected = [synthetic.accept(drafts, chosen, 1000 + r, first[r]) for r in range(4)]
        state.step()
        assert [state.out(r) for r in range(4)] == [verdict.token_ids for verdict in expected]
        counts += state.requests.accepted[:4].tolist()
        assert counts[-4:] == [verdict.num_accepted_tokens for verdict in expected]
    assert len(set(counts)) > 1
