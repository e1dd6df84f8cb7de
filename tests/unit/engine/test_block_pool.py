import random

import pytest

from lean_laguna.engine.block_pool import NULL_BLOCK, BlockPool


def test_null_block_is_never_handed_out():
    pool = BlockPool(5)
    assert pool.capacity == 4
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.num_available == 0
    assert NULL_BLOCK not in [1, 2, 3, 4]


def test_released_blocks_are_free_again():
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    pool.release(blocks)
    assert pool.num_available == 3
    assert pool.num_in_use == 0
    assert sorted(pool.allocate(3)) == [1, 2, 3]


def test_shared_block_is_free_only_after_its_last_owner():
    pool = BlockPool(3)
    (block,) = pool.allocate(1)
    pool.acquire([block])
    pool.release([block])
    assert pool.num_in_use == 1
    pool.release([block])
    assert pool.num_in_use == 0


def test_cached_block_counts_as_available_and_is_reclaimed_last():
    pool = BlockPool(3)
    kept, other = pool.allocate(2)
    pool.hold_cached([kept])
    pool.release([kept, other])
    assert pool.num_available == 2
    assert pool.num_cached_only == 1
    dropped = []

    def reclaim():
        dropped.append(kept)
        pool.drop_cached([kept])

    pool.reclaim = reclaim
    assert pool.allocate(1) == [other]
    assert not dropped
    assert pool.allocate(1) == [kept]
    assert dropped == [kept]


def test_cached_block_can_be_used_again():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.hold_cached([block])
    pool.release([block])
    pool.acquire([block])
    assert pool.num_available == 0
    assert pool.num_cached_only == 0
    pool.drop_cached([block])
    assert pool.num_available == 0
    pool.release([block])
    assert pool.num_available == 1


@pytest.mark.parametrize(
    "misuse",
    [
        lambda pool, block: pool.acquire([block + 1]),
        lambda pool, block: pool.release([block + 1]),
        lambda pool, block: pool.hold_cached([block + 1]),
        lambda pool, block: pool.drop_cached([block]),
    ],
    ids=["share a free block", "release a free block", "cache a free block", "uncache what is not cached"],
)
def test_misuse_is_caught(misuse):
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    with pytest.raises(AssertionError):
        misuse(pool, 2 if block != 2 else 1)


def test_every_block_has_one_owner_kind_whatever_happens():
    rng = random.Random(0)
    pool = BlockPool(12)
    held: list[list[int]] = []
    cached: list[list[int]] = []

    def reclaim():
        before = pool.num_cached_only
        while pool.num_cached_only == before:
            pool.drop_cached(cached.pop(0))

    pool.reclaim = reclaim
    for _ in range(2000):
        action = rng.randrange(5)
        if action == 0 and pool.num_available >= 2:
            held.append(pool.allocate(2))
        elif action == 1 and held:
            pool.release(held.pop(rng.randrange(len(held))))
        elif action == 2 and held:
            cached.append(list(rng.choice(held)))
            pool.hold_cached(cached[-1])
        elif action == 3 and cached:
            held.append(list(rng.choice(cached)))
            pool.acquire(held[-1])
        elif action == 4 and cached:
            pool.drop_cached(cached.pop())
        in_use = {block for blocks in held for block in blocks}
        only_cached = {block for blocks in cached for block in blocks} - in_use
        assert pool.num_in_use == len(in_use)
        assert pool.num_cached_only == len(only_cached)
        assert pool.num_available == pool.capacity - len(in_use)
    for blocks in held:
        pool.release(blocks)
    for blocks in cached:
        pool.drop_cached(blocks)
    assert pool.num_available == pool.capacity
