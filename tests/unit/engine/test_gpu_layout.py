"""Requests laid out as rows: anchors, places for drafts, limits, stop tokens; and how they are split."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed; it comes with PyTorch's CUDA builds")

import math

from lean_laguna.core.types import SamplingParams
from lean_laguna.engine.gpu_layout import chances_made, has_filters, lay_out, split_rows, tokens_said
from lean_laguna.engine.gpu_state import Block
from support.engines import make_engine, tokens_of


def decoding(*params):
    """Sequences of an engine that have said one token."""
    engine = make_engine()
    states = [engine.add_request(tokens_of(i, 5 + i), one) for i, one in enumerate(params)]
    while any(not state.sequences[0].completion.token_ids for state in states):
        engine.step()
    return [state.sequences[0] for state in states]


@pytest.mark.parametrize(
    ("drafts", "most", "expected"),
    [
        ([], 16, []),
        ([0] * 16, 16, [range(16)]),
        ([0] * 17, 16, [range(16), range(16, 17)]),
        ([7, 7], 16, [range(2)]),
        ([7, 7, 7], 16, [range(2), range(2, 3)]),
        ([15, 0, 15], 16, [range(1), range(1, 2), range(2, 3)]),
        ([15, 0, 15], 64, [range(3)]),
        ([7] * 9, 64, [range(8), range(8, 9)]),
    ],
)
def test_launches_hold_no_more_rows_than_they_take(drafts, most, expected):
    assert split_rows(drafts, most) == expected


def test_rows_start_with_the_anchor_and_stop_at_the_limit():
    first, second = decoding(
        SamplingParams(temperature=0.5, max_tokens=9, seed=2**63 + 1, stop_token_ids=(44,)),
        SamplingParams(temperature=0, max_tokens=3, ignore_eos=True),
    )
    fields = Block.allocate("cpu").arrays
    lay_out(fields, [first, second], [3, 3], mask_token=12)
    left = second.completion.num_remaining
    assert fields["num_rows"][0] == 4 + left
    assert fields["input_ids"][:4].tolist() == [first.completion.token_ids[-1], 12, 12, 12]
    assert fields["positions"][:4].tolist() == [first.num_computed + i for i in range(4)]
    assert fields["row_start"][:2].tolist() == [0, 4]
    assert fields["row_count"][:2].tolist() == [4, left]
    assert fields["seeds"][0] == 2**63 + 1 - 2**64
    assert set(fields["stop_ids"][0].tolist()) == {44, *first.sampling.eos_token_ids, -1}
    assert set(fields["stop_ids"][1].tolist()) == {-1}
    assert fields["remaining"][1] == left


def test_filters_go_along_where_the_device_applies_them():
    params = [
        SamplingParams(temperature=1.0, top_k=20, min_p=0.1, max_tokens=4),
        SamplingParams(temperature=1.0, top_p=0.9, max_tokens=4),
        SamplingParams(temperature=0.0, top_k=20, max_tokens=4),
    ]
    sequences = decoding(*params)
    fields = Block.allocate("cpu").arrays
    lay_out(fields, sequences, [0] * 3, mask_token=0)
    assert fields["top_k"][:3].tolist() == [20, 0, 0]
    assert fields["log_min_p"][0] == pytest.approx(math.log(0.1))
    assert has_filters(sequences)
    assert not has_filters(sequences[1:])


def test_tokens_are_read_from_the_ring_past_its_end():
    fields = Block.allocate("cpu").arrays
    fields["emitted"][1] = 66
    fields["ring"][1, 62:64] = [7, 8]
    fields["ring"][1, :2] = [9, 10]
    assert tokens_said(fields, 1, 62) == [7, 8, 9, 10]
    assert tokens_said(fields, 1, 66) == []


def test_chances_are_those_of_the_rows_as_they_were_laid_out():
    """Three drafts of the first request, all sent; of the second's four one is cut and two were not made."""
    fields = Block.allocate("cpu").arrays
    fields["row_count"][:3] = 4, 2, 1
    fields["chances"][:10] = 0, 0.9, 0.8, 0.7, 0, 0.5, 0.25, -1, -1, 0
    assert chances_made(fields, [0, 3, 0]) == [
        pytest.approx((0.9, 0.8, 0.7)),
        (0.5, 0.25, 0.25, 0.25),  # as likely as the last that was made
        (),
    ]
