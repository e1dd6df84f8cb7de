from hypothesis import given
from hypothesis import strategies as st

from lean_laguna.engine.block_pool import NULL_BLOCK, BlockPool
from lean_laguna.engine.block_table import BlockTable, blocks_for, max_blocks_touched, quota_blocks


def test_unwindowed_table_keeps_everything():
    table = BlockTable(BlockPool(20), None, 4)
    table.extend(13)
    table.slide(12)
    assert table.num_held == 4
    assert NULL_BLOCK not in table.as_tuple()


def test_windowed_table_keeps_what_the_next_query_can_see():
    pool = BlockPool(20)
    table = BlockTable(pool, 8, 4)
    table.extend(16)
    table.slide(11)  # sees positions 4 .. 11
    assert table.as_tuple()[0] == NULL_BLOCK
    assert table.as_tuple()[1] != NULL_BLOCK
    table.slide(14)  # sees positions 7 .. 14: block 1 still holds 7
    assert table.as_tuple()[1] != NULL_BLOCK
    table.slide(15)
    assert table.as_tuple()[:2] == (NULL_BLOCK, NULL_BLOCK)
    assert pool.num_in_use == table.num_held == 2


def test_table_object_is_reused_until_it_changes():
    table = BlockTable(BlockPool(20), 8, 4)
    table.extend(5)
    first = table.as_tuple()
    table.slide(3)
    table.extend(8)
    assert table.as_tuple() is first
    table.extend(9)
    assert table.as_tuple() is not first


def test_adopted_blocks_are_shared_not_copied():
    pool = BlockPool(20)
    owner, guest = BlockTable(pool, 8, 4), BlockTable(pool, 8, 4)
    owner.extend(12)
    first, blocks = owner.blocks(5, 12)
    guest.adopt(first, blocks)
    assert guest.as_tuple() == (NULL_BLOCK, *blocks)
    owner.clear()
    assert pool.num_in_use == 2
    guest.clear()
    assert pool.num_in_use == 0


@given(
    block_size=st.sampled_from([1, 2, 4, 16]),
    window=st.one_of(st.none(), st.integers(1, 40)),
    rows=st.integers(1, 20),
    total=st.integers(1, 120),
    steps=st.lists(st.integers(1, 20), max_size=60),
)
def test_sequence_never_holds_more_than_its_quota(block_size, window, rows, total, steps):
    rows = min(rows, total)
    pool = BlockPool(400)
    table = BlockTable(pool, window, block_size)
    quota = quota_blocks(total, rows, window, block_size)
    position = 0
    for step in steps:
        num_rows = min(step, rows, total - position)
        if num_rows == 0:
            break
        table.slide(position)
        table.extend(position + num_rows)
        assert table.num_held <= quota
        entries = table.as_tuple()
        first_visible = 0 if window is None else max(0, position - window + 1)
        needed = range(first_visible // block_size, blocks_for(position + num_rows, block_size))
        assert all(entries[block] != NULL_BLOCK for block in needed)
        position += num_rows
    table.clear()
    assert pool.num_in_use == 0


def test_quota_of_a_windowed_group_does_not_grow_with_the_context():
    assert quota_blocks(10_000, 8, 128, 16) == quota_blocks(1_000_000, 8, 128, 16)
    assert quota_blocks(20, 8, 128, 16) == 2
    assert quota_blocks(1000, 8, None, 16) == 63


@given(start=st.integers(0, 100), count=st.integers(1, 50), block_size=st.integers(1, 17))
def test_touched_blocks_bound_holds_at_every_start(start, count, block_size):
    touched = (start + count - 1) // block_size - start // block_size + 1
    assert touched <= max_blocks_touched(count, block_size)
