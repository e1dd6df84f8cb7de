import torch

from lean_laguna.models.kv_cache import KVCache, KVGroup

GROUPS = (KVGroup("full", 2, 2, 4), KVGroup("sliding", 0, 2, 4, 8))


def test_layers_are_views_of_zeroed_pages():
    cache = KVCache(GROUPS, [5, 3], 4)
    k, v = cache.layer(0, 1)
    assert k.shape == v.shape == (5, 4, 2, 4)
    assert not k.any()
    cache.storage(0, 1)[2, 3, 0] = 7
    assert k[2, 3].eq(7).all()
    assert not v.any()


def test_rows_land_in_their_slots_and_null_slots_are_dropped():
    cache = KVCache(GROUPS, [5, 3], 4)
    k, v = torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    cache.write(0, 0, torch.tensor([4 * 4 + 1, 2, 1 * 4 + 3]), k, v)
    stored_k, stored_v = cache.layer(0, 0)
    assert torch.equal(stored_k[4, 1], k[0])
    assert torch.equal(stored_v[1, 3], v[2])
    assert not stored_k[0].any()
    assert not stored_v[0].any()
    assert not cache.layer(0, 1)[0].any()


def test_a_block_is_counted_over_all_layers():
    assert GROUPS[0].block_bytes(4, torch.bfloat16) == 2 * 4 * 2 * 2 * 4 * 2
    assert GROUPS[1].block_bytes(4, torch.float32) == 0
