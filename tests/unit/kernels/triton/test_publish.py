"""A step's block reaches the host whole, in turn, with the step's number."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; it comes with PyTorch's CUDA builds")

from lean_laguna.kernels.triton.launch import Launch
from lean_laguna.kernels.triton.publish import NUM_STAMP_WORDS, publish

NUM_BLOCKS, NUM_WORDS = 3, 3000


def test_blocks_are_left_in_turn_and_numbered(device):
    words = torch.arange(100, 100 + NUM_WORDS, dtype=torch.int32, device=device)
    said = torch.full((NUM_BLOCKS, NUM_WORDS), -1, dtype=torch.int32, pin_memory=words.is_cuda)
    turn = torch.zeros(1, dtype=torch.int32, device=device)
    stamps = said[:, :NUM_STAMP_WORDS].view(torch.int64)
    for step in range(NUM_BLOCKS + 1):
        words[-1] = step
        publish(words, said, turn, Launch())
        if words.is_cuda:
            torch.cuda.synchronize()
        at = step % NUM_BLOCKS
        assert said[at, NUM_STAMP_WORDS:].tolist() == words[NUM_STAMP_WORDS:].tolist()
        assert stamps[at, :2].tolist() == words[:4].view(torch.int64).tolist()
        assert stamps[at, 3] == step + 1
        assert not words.is_cuda or stamps[at, 2] > 0
    assert said[1, -1] == 1, "the blocks between stay"
    assert turn.item() == NUM_BLOCKS + 1


def test_only_the_entries_that_there_are_go_along(device):
    words = torch.arange(NUM_WORDS, dtype=torch.int32, device=device)
    said = torch.full((1, NUM_WORDS), -1, dtype=torch.int32, pin_memory=words.is_cuda)
    entries, num_entries = words[NUM_WORDS - 12 :].view(4, 3), words[9:10]
    num_entries[0] = 2
    publish(words, said, torch.zeros_like(num_entries), Launch(), entries=entries, num_entries=num_entries)
    if words.is_cuda:
        torch.cuda.synchronize()
    assert said[0, NUM_STAMP_WORDS:-6].tolist() == words[NUM_STAMP_WORDS:-6].tolist()
    assert said[0, -6:].tolist() == [-1] * 6
