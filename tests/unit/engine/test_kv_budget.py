import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lean_laguna.core.errors import ConfigError
from lean_laguna.engine.block_table import quota_blocks
from lean_laguna.engine.kv_budget import free_memory_bytes, plan_kv_blocks, stored_groups
from lean_laguna.models.kv_cache import KVCache, KVGroup

GROUPS = (
    KVGroup("full", 2, 2, 8, None),
    KVGroup("sliding", 3, 2, 8, 16),
    KVGroup("draft_full", 0, 2, 8, None),
    KVGroup("draft_sliding", 1, 4, 8, 16),
)


def plan(budget_bytes, *, max_model_len=256, max_num_seqs=4, given=False, caching=True, groups=GROUPS):
    return plan_kv_blocks(
        groups,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        rows_per_step=32,
        kv_block_size=8,
        dtype=torch.float32,
        enable_prefix_caching=caching,
        budget_bytes=budget_bytes,
        is_budget_given=given,
    )


def test_plan_is_byte_exact_against_the_allocation():
    budget = plan(10**7)
    cache = KVCache(GROUPS, budget.num_blocks, 8)
    storages = [cache.storage(g, i) for g, group in enumerate(GROUPS) for i in range(group.num_layers)]
    assert budget.total_bytes == sum(tensor.nbytes for tensor in storages)


def test_groups_in_fp8_are_allocated_as_planned_too():
    groups = (*stored_groups(GROUPS[:2], "fp8"), *GROUPS[2:])
    budget = plan(10**7, groups=groups)
    cache = KVCache(groups, budget.num_blocks, 8)
    storages = [cache.storage(g, i) for g, group in enumerate(groups) for i in range(group.num_layers)]
    assert budget.total_bytes == sum(tensor.nbytes for tensor in storages)
    assert [size * 4 for size in budget.block_bytes[:2]] == list(plan(10**7).block_bytes[:2])
    assert stored_groups(GROUPS, "auto") == GROUPS


def test_plan_holds_the_sequences_it_promises():
    budget = plan(10**7, caching=False)
    assert budget.num_full_length_seqs == 4
    for group, num_blocks in zip(GROUPS, budget.num_blocks, strict=True):
        if group.num_layers:
            assert num_blocks - 1 == 4 * quota_blocks(256, 32, group.window, 8)


def test_windowed_group_does_not_grow_with_the_context():
    short, long = plan(10**8), plan(10**8, max_model_len=4096)
    assert long.num_blocks[1] == short.num_blocks[1]
    assert long.num_blocks[0] - 1 == 16 * (short.num_blocks[0] - 1)


def test_group_without_layers_costs_nothing():
    assert plan(10**7).num_blocks[2] == 1
    assert plan(10**7).block_bytes[2] == 0


def test_given_budget_is_used_for_cached_prompts_too():
    assert plan(10**7, given=True).num_full_length_seqs > 4
    assert plan(10**7, given=True, caching=False).num_full_length_seqs == 4


@settings(max_examples=50)
@given(budget_bytes=st.integers(10**4, 10**7), max_model_len=st.integers(1, 2000), caching=st.booleans())
def test_plan_stays_within_its_budget_or_names_the_length_that_fits(budget_bytes, max_model_len, caching):
    try:
        budget = plan(budget_bytes, max_model_len=max_model_len, caching=caching)
    except ConfigError as error:
        fits = int(str(error).rpartition(" ")[2]) if "largest" in str(error) else 0
        assert fits < max_model_len
        if fits:
            assert plan(budget_bytes, max_model_len=fits, caching=caching).num_full_length_seqs >= 1
        with pytest.raises(ConfigError):
            plan(budget_bytes, max_model_len=fits + 1, caching=caching)
    else:
        assert budget.total_bytes <= budget_bytes
        assert budget.num_full_length_seqs >= 1


def test_refusal_says_what_is_needed_what_is_there_and_what_fits():
    with pytest.raises(
        ConfigError, match=r"max_model_len 256 needs \d+ bytes .* 20000 are available; the largest"
    ):
        plan(20000)


def test_free_memory_is_a_positive_number_of_bytes():
    assert free_memory_bytes(torch.device("cpu")) > 1 << 20
