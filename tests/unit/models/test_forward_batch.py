import torch

from lean_laguna.models.forward_batch import ForwardBatch, SequenceSpan


def test_slots_follow_each_groups_table():
    spans = (SequenceSpan(0, 3, 7, ((9, 5, 3), (0, 0, 2))), SequenceSpan(3, 2, 0, ((4,), (1,))))
    batch = ForwardBatch(torch.zeros(5, dtype=torch.int64), torch.tensor([7, 8, 9, 0, 1]), spans, 4)
    assert batch.slot_mapping(0).tolist() == [5 * 4 + 3, 3 * 4, 3 * 4 + 1, 16, 17]
    assert batch.slot_mapping(1).tolist() == [3, 2 * 4, 2 * 4 + 1, 4, 5]


def test_a_single_sequence_counts_its_positions():
    batch = ForwardBatch.single(torch.tensor([3, 4]), 6, ((1, 2),), 4)
    assert batch.positions.tolist() == [6, 7]
    assert batch.spans == (SequenceSpan(0, 2, 6, ((1, 2),)),)
    assert batch.slot_mapping(0).tolist() == [10, 11]
