"""vLLM's arithmetic, held against what vLLM itself logged in a published recipe."""

import pytest

from lean_laguna.models.shapes import drafter_shape, laguna_shape
from lean_laguna.plan.vllm_memory import VLLMMemory

XS, DRAFTER = laguna_shape("laguna-xs-2.1"), drafter_shape("laguna-xs-2.1")


def test_the_log_of_the_dgx_spark_recipe_is_reproduced():
    # 'GPU KV cache size: 393,261 tokens ... 1.50x' with these flags, FP8 keys and values and the drafter.
    memory = VLLMMemory.of(XS, DRAFTER, element_bytes=1, max_num_batched_tokens=8192)
    concurrency = memory.concurrency(262144, 12884901888)
    assert f"{concurrency:.2f}" == "1.50"
    assert int(concurrency * 262144) == 393261


@pytest.mark.parametrize(
    ("name", "with_drafter", "groups"),
    [
        ("laguna-xs-2.1", False, (1, 3, 10)),
        ("laguna-xs-2.1", True, (1, 2, 15)),
        ("laguna-s-2.1", False, (1, 3, 12)),
        ("laguna-s-2.1", True, (1, 2, 18)),
    ],
)
def test_layers_are_grouped_by_the_smaller_kind(name, with_drafter, groups):
    memory = VLLMMemory.of(laguna_shape(name), drafter_shape(name) if with_drafter else None, element_bytes=2)
    assert (memory.num_full_groups, memory.num_sliding_groups, memory.layers_per_group) == groups


@pytest.mark.parametrize("num_seqs", [1, 3])
def test_the_flags_hold_what_they_promise_and_no_block_more(num_seqs):
    memory = VLLMMemory.of(XS, DRAFTER, element_bytes=2)
    size = memory.kv_bytes(100_000, num_seqs)
    assert memory.most_streams(100_000, size) == num_seqs
    assert memory.most_streams(100_000, size - 1) == num_seqs - 1
    longest = memory.longest_context(num_seqs, size)
    assert 100_000 <= longest < 100_016
    assert memory.kv_bytes(longest, num_seqs) <= size < memory.kv_bytes(longest + 1, num_seqs)
    assert f"--kv-cache-memory-bytes {size}" in memory.flags(100_000, num_seqs)
    assert memory.most_streams(100_000, 0) == memory.longest_context(num_seqs, 0) == 0
