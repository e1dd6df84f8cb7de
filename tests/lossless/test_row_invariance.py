"""A row's bits are the same in prefill, decode and verification, whoever shares the batch."""

from __future__ import annotations

import pytest
import torch
from tests.support.targets import (
    FULL,
    SLIDING,
    PagedRun,
    laguna_json,
    random_ids,
    random_partition,
    random_target,
    run_alone,
)

from lean_laguna.core.model_config import LagunaConfig

SHAPES = {
    "tiny": {},
    "experts beyond a bank": {"num_experts": 20, "num_experts_per_tok": 3},
    "odd widths": {
        "hidden_size": 42,
        "num_attention_heads_per_layer": [1, 3, 5, 2],
        "num_key_value_heads": 1,
        "head_dim": 10,
        "intermediate_size": 37,
        "moe_intermediate_size": 13,
        "shared_expert_intermediate_size": 7,
        "vocab_size": 67,
        "rope_parameters": {
            FULL: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.6},
            SLIDING: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
        },
    },
    "gate per element": {"gating": "per-element", "moe_router_logit_softcapping": 0.7},
    "no gate, tied": {"gating": False, "tie_word_embeddings": True, "norm_topk_prob": False},
    "window of one and a half chunks": {"sliding_window": 96},
    "all sliding": {"layer_types": [SLIDING] * 4},
    "all full": {"layer_types": [FULL] * 4},
}


@pytest.fixture(scope="module", params=SHAPES)
def target(request):
    return random_target(LagunaConfig.from_dict(laguna_json(**SHAPES[request.param])))


def test_any_chunking_equals_decoding_one_by_one(target):
    ids = random_ids(150)
    logits, taps = run_alone(target, ids, [1] * 150)
    assert torch.isfinite(logits).all()
    for seed in range(3):
        parts = random_partition(150, seed)
        other_logits, other_taps = run_alone(target, ids, parts, seed=seed)
        assert torch.equal(taps, other_taps), parts
        assert torch.equal(logits, other_logits), parts


@pytest.mark.parametrize("num_rows", range(1, 17))
def test_a_verified_block_equals_decoding(target, num_rows):
    ids = random_ids(60 + num_rows)
    expected = run_alone(target, ids, [60, *[1] * num_rows])
    found = run_alone(target, ids, [60, num_rows])
    assert torch.equal(expected[0], found[0])
    assert torch.equal(expected[1], found[1])


def test_neighbours_slots_and_pages_do_not_matter(target):
    lengths = [90, 61, 20]
    texts = [random_ids(length, seed) for seed, length in enumerate(lengths)]
    alone = [run_alone(target, ids, [ids.numel()]) for ids in texts]
    taps = tuple(range(target.config.num_hidden_layers))
    for seed in range(2):
        run = PagedRun(target, lengths, seed=seed)
        queues = [list(ids.split(random_partition(len(ids), seed, 17))) for ids in texts]
        found = [[], [], []]
        turn = seed
        while any(queues):
            order = [(turn + i) % 3 for i in range(3)]
            parts = [(i, queues[i].pop(0)) for i in order if queues[i] and (turn + i) % 4]
            turn += 1
            for (i, _), out in zip(parts, run.step(parts, taps) if parts else [], strict=True):
                found[i].append(out)
        for i, outs in enumerate(found):
            assert torch.equal(torch.cat([logits for logits, _ in outs]), alone[i][0])
            assert torch.equal(torch.cat([aux for _, aux in outs]), alone[i][1])


def test_contexts_of_many_chunks_keep_their_bits():
    target = random_target(LagunaConfig.from_dict(laguna_json(max_position_embeddings=2048)))
    ids = random_ids(1400)
    whole = run_alone(target, ids, [1400], page=16)
    found = run_alone(target, ids, [700, 500, 180, 1, 1, 1, 1, 8, 8], page=16)
    assert torch.equal(whole[0], found[0])
    assert torch.equal(whole[1], found[1])


@pytest.mark.parametrize("shape", ["odd widths", "tiny"])
def test_windows_and_contexts_of_more_chunks_than_torch_adds_in_order(shape):
    config = laguna_json(**SHAPES[shape], max_position_embeddings=2048, sliding_window=1200)
    target = random_target(LagunaConfig.from_dict(config))
    ids = random_ids(1300, vocab=target.config.vocab_size)
    whole = run_alone(target, ids, [1300], page=16)
    found = run_alone(target, ids, [1240, 1, 1, 8, 1, 16, 1, 8, 8, *[1] * 16], page=16)
    assert torch.equal(whole[0], found[0])
    assert torch.equal(whole[1], found[1])


def test_rejected_rows_that_were_overwritten_leave_nothing(tiny_target):
    ids = random_ids(60)
    expected, _ = run_alone(tiny_target, ids, [40, 20])
    run = PagedRun(tiny_target, [60])
    run.step([(0, ids[:40])])
    run.step([(0, random_ids(16, seed=9))])
    run.done[0] = 40
    assert torch.equal(run.step([(0, ids[40:])])[0][0], expected[40:])
