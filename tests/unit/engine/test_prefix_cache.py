import pytest

from lean_laguna.engine.block_pool import BlockPool
from lean_laguna.engine.block_table import BlockTable
from lean_laguna.engine.prefix_cache import KeptBlocks, PrefixCache, prefix_keys

CHUNK, BLOCK, WINDOW = 8, 4, 6


class Computed:
    """A prompt computed chunk by chunk into a full and a windowed group."""

    def __init__(self, cache, pools, tokens):
        self.keys = prefix_keys(tokens, CHUNK)
        self.tables = [BlockTable(pools[0], None, BLOCK), BlockTable(pools[1], WINDOW, BLOCK)]
        for start in range(0, len(tokens), CHUNK):
            end = min(start + CHUNK, len(tokens))
            for table in self.tables:
                table.slide(start)
                table.extend(end)
            if end % CHUNK == 0:
                cache.insert(self.keys, end, self.tables)

    def free(self):
        for table in self.tables:
            table.clear()


@pytest.fixture
def pools():
    return [BlockPool(13), BlockPool(13)]


@pytest.fixture
def cache(pools):
    return PrefixCache(pools, [None, WINDOW], CHUNK)


def test_key_stands_for_the_whole_prefix():
    first = prefix_keys([1] * 8 + [2] * 8 + [3], CHUNK)
    second = prefix_keys([9] * 8 + [2] * 8, CHUNK)
    assert len(first) == 2
    assert first[0] != second[0]
    assert first[1] != second[1]
    assert prefix_keys([1] * 8 + [2] * 8, CHUNK) == first
    assert prefix_keys([1] * 7, CHUNK) == ()


def test_hit_is_the_longest_cached_prefix(cache, pools):
    tokens = list(range(20))
    Computed(cache, pools, tokens).free()
    keys = prefix_keys(tokens, CHUNK)
    hit = cache.lookup(keys, 20)
    assert hit.num_tokens == 16
    assert hit.kept[0].first_logical_block == 0
    assert len(hit.kept[0].blocks) == 4
    # A query at position 16 sees 11 .. 16: blocks 2 and 3.
    assert hit.kept[1].first_logical_block == 2
    assert len(hit.kept[1].blocks) == 2


def test_hit_leaves_a_token_to_compute(cache, pools):
    tokens = list(range(16))
    Computed(cache, pools, tokens).free()
    assert cache.lookup(prefix_keys(tokens, CHUNK), 16).num_tokens == 8
    assert cache.lookup(prefix_keys(tokens[:8], CHUNK), 8) is None


def test_other_prompt_does_not_hit(cache, pools):
    Computed(cache, pools, list(range(20))).free()
    assert cache.lookup(prefix_keys([7, *range(1, 20)], CHUNK), 20) is None


def test_hit_restores_the_blocks_that_were_written(cache, pools):
    tokens = list(range(20))
    first = Computed(cache, pools, tokens)
    hit = cache.lookup(prefix_keys(tokens, CHUNK), 20)
    assert hit.kept == (
        KeptBlocks(*first.tables[0].blocks(0, 16)),
        KeptBlocks(*first.tables[1].blocks(11, 16)),
    )


def test_cache_gives_way_when_blocks_run_out(cache, pools):
    Computed(cache, pools, list(range(16))).free()
    Computed(cache, pools, list(range(100, 116))).free()
    assert len(cache) == 4
    taken = pools[0].allocate(pools[0].num_available)
    assert len(cache) == 0
    assert pools[1].num_available == pools[1].capacity
    pools[0].release(taken)


def test_least_recently_used_prefix_goes_first_and_its_end_before_its_start(cache, pools):
    old, new = list(range(16)), list(range(100, 116))
    Computed(cache, pools, old).free()
    Computed(cache, pools, new).free()
    old_keys, new_keys = prefix_keys(old, CHUNK), prefix_keys(new, CHUNK)
    cache.lookup(old_keys, 17)
    order = []
    while len(cache):
        before = {key for key in (*old_keys, *new_keys) if key in cache}
        pools[0].allocate(len(pools[0]._free) + 1)
        order += [key for key in before if key not in cache]
    assert order == [new_keys[1], new_keys[0], old_keys[1], old_keys[0]]


def test_blocks_in_use_are_not_evicted(cache, pools):
    running = Computed(cache, pools, list(range(16)))
    Computed(cache, pools, list(range(100, 108))).free()
    pools[0].allocate(pools[0].num_available)
    assert running.keys[0] in cache
    assert running.keys[1] in cache
    assert len(cache) == 2


def test_windowed_pressure_costs_ends_not_chunks_and_the_last_end_stays_longest(cache, pools):
    tokens = list(range(36))
    Computed(cache, pools, tokens).free()
    keys = prefix_keys(tokens, CHUNK)
    pools[1].allocate(pools[1].capacity - 2)
    assert [key in cache for key in keys] == [False, False, False, True]
    assert cache.lookup(keys, 36).num_tokens == 32
    assert cache.lookup(keys, 32) is None
    assert pools[0].num_cached_only == 8


def test_lost_end_is_kept_again_when_recomputed(cache, pools):
    tokens = list(range(20))
    Computed(cache, pools, tokens).free()
    taken = pools[1].allocate(pools[1].capacity)
    assert len(cache) == 0
    pools[1].release(taken)
    Computed(cache, pools, tokens).free()
    assert cache.lookup(prefix_keys(tokens, CHUNK), 20).num_tokens == 16
    cache.clear()
    assert all(pool.num_available == pool.capacity and pool.num_cached_only == 0 for pool in pools)


def test_clear_frees_every_block(cache, pools):
    Computed(cache, pools, list(range(20))).free()
    cache.clear()
    assert all(pool.num_available == pool.capacity for pool in pools)
    assert all(pool.num_cached_only == 0 for pool in pools)


def test_entry_without_its_parent_is_not_kept(cache, pools):
    computed = Computed(cache, pools, list(range(16)))
    cache.clear()
    cache.insert(computed.keys, 16, computed.tables)
    assert len(cache) == 0
