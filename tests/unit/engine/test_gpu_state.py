"""A block's fields share its memory on both sides, and do not overlap."""

import numpy as np
import torch

from lean_laguna.engine.gpu_state import (
    MAX_ROWS,
    MAX_STOPS,
    NUM_WORDS,
    RING,
    Block,
    Said,
)


def test_fields_cover_the_block_without_overlap():
    block = Block.allocate("cpu")
    for i, part in enumerate(block.fields.values()):
        part.fill_(i + 1)
    sizes = {name: part.numel() * part.element_size() // 4 for name, part in block.fields.items()}
    assert sum(sizes.values()) == NUM_WORDS == block.words.numel()
    for i, (name, part) in enumerate(block.fields.items()):
        assert bool((part == i + 1).all()), name
        assert part.data_ptr() % 16 == 0, name
    assert block.fields["stop_ids"].shape == (MAX_ROWS, MAX_STOPS)
    assert block.fields["ring"].shape == (MAX_ROWS, RING)


def test_arrays_write_through_to_the_words():
    block = Block.allocate("cpu")
    block.arrays["seeds"].view(np.uint64)[1] = 2**64 - 1
    block.arrays["temperatures"][2] = 0.5
    assert block.fields["seeds"][1].item() == -1
    assert block.fields["temperatures"][2].item() == 0.5


def test_steps_leave_their_blocks_in_turn():
    said = Said(torch.device("cpu"), 3)
    turns = [said.next() for _ in range(4)]
    assert [turn for turn, _ in turns] == [1, 2, 3, 4]
    said.words[1, -1] = 7
    assert turns[1][1].arrays["ring"][-1, -1] == 7
    assert turns[0][1] is turns[3][1] is not turns[1][1]
    said.turn += 5
    said.restart()
    assert said.next() == (1, turns[0][1])
    assert said.turn.item() == 0
