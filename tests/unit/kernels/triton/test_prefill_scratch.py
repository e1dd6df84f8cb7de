"""Blocks of a chunk: a few shapes, lengths on the device, and little room for what experts leave."""

import copy

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; it comes with PyTorch's CUDA builds")

from lean_laguna.engine.gpu_weights import target_weights
from lean_laguna.kernels.triton.prefill_scratch import PrefillScratch, experts_width, shape_rows, split
from support.engines import tiny_target


@pytest.fixture(scope="module")
def weights():
    return target_weights(copy.deepcopy(tiny_target()), 300)


def test_blocks_are_padded_to_a_few_shapes():
    assert [shape_rows(n, 2048) for n in (1, 256, 257, 1500, 2048)] == [256, 256, 512, 2048, 2048]
    assert [shape_rows(n, 2048) for n in (2049, 4096, 8000)] == [2304, 4096, 8192]
    assert [shape_rows(n, 96) for n in (1, 96)] == [96, 96]
    assert shape_rows(700, 768) == 768


def test_a_chunks_blocks_know_their_rows_and_tokens(weights):
    scratch = PrefillScratch.allocate(weights, 64, block=16)
    scratch.note(160, 37)
    blocks = scratch.blocks(37)
    assert [(b.at, b.rows, b.length.item(), b.first.item()) for b in blocks] == [
        (0, 16, 16, 160),
        (16, 16, 16, 176),
        (32, 16, 5, 192),
    ]
    assert scratch.length.item() == 37
    assert scratch.numbers[:, 0].tolist() == [37, 16, 16, 5, 0]
    assert all(t.data_ptr() % 16 == 0 for block in blocks for t in (block.length, block.first))
    assert scratch.hidden[blocks[2].own].shape[0] == 16


def test_a_chunk_that_is_not_whole_blocks_is_one(weights):
    assert PrefillScratch.allocate(weights, 40, block=16).block == 40


def test_longer_chunks_leave_fewer_columns_of_experts_at_a_time(weights):
    mlp, hidden = weights.layers[1].mlp, weights.norm.shape[0]
    (experts, _, width), routing = mlp.down.shape, mlp.bias.shape[0] + 3 * mlp.shared_down.shape[1]
    assert experts == mlp.bias.shape[0]
    for rows, columns in ((16, hidden), (32, hidden), (64, hidden // 2)):
        own = mlp.top_k * width + max(routing, mlp.top_k * columns)
        assert experts_width(weights, rows, 16) == own
    wide = PrefillScratch.allocate(weights, 64, block=16, context_width=10_000).room.numel()
    assert wide == 16 * (hidden + 10_000)


def test_what_attention_of_a_block_leaves_lies_beside_its_keys(weights):
    scratch = PrefillScratch.allocate(weights, 64, block=16)
    scratch.room.fill_(0)
    for part in (scratch.delta(16), *scratch.keys, scratch.beside_keys()):
        assert not part.any()
        part.fill_(1)
    assert scratch.room.all()
    shape = max((layer.attention.shape for layer in weights.layers), key=lambda one: one.num_heads)
    assert scratch.beside_keys().numel() >= 16 * (shape.width + shape.num_heads * shape.head_dim)


def test_a_flat_buffer_is_cut_into_rows_one_after_another():
    first, second = split(torch.arange(20), 2, 3, 4)
    assert first.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert second.tolist() == [[6, 7, 8, 9], [10, 11, 12, 13]]
