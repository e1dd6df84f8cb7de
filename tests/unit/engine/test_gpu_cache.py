"""Pages of a group's layers lie side by side, keys and values apart, and a layer is a view."""

import torch

from lean_laguna.engine.gpu_cache import PagedPools
from lean_laguna.models.kv_cache import KVGroup


def test_layers_are_views_of_their_group():
    groups = (KVGroup("full", 2, 3, 8, None), KVGroup("sliding", 0, 3, 8, 16))
    pools = PagedPools(groups, (5, 1), 4, torch.float32)
    keys, values = pools.group(0)
    assert keys.shape == values.shape == (2, 5, 4, 3, 8)
    pools.layer(0, 1)[1].fill_(7)
    assert bool((values[1] == 7).all())
    assert not keys.any()
    assert not values[0].any()
    assert pools.group(1)[0].shape[0] == 0
    assert keys.nbytes + values.nbytes == 5 * groups[0].block_bytes(4, torch.float32)
