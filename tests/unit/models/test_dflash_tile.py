import pytest
import torch
from tests.unit.models.test_dflash import native, propose, taps

from lean_laguna.models.dflash_tile import MAX_ROWS, DraftPasses
from support.drafters import PagedContext, random_drafter, zlab_json


def without_passes(drafter):
    """Make the drafter run every batch as it runs those of several requests."""
    drafter.pack()
    drafter._passes = None
    return drafter


@pytest.mark.parametrize("gating", ["per-head", "per-element", False])
@pytest.mark.parametrize("causal", [True, False])
def test_prepared_rounds_give_what_packed_batches_give(causal, gating):
    drafters = [random_drafter(native(causal, gating=gating)) for _ in range(2)]
    without_passes(drafters[1])
    contexts = [PagedContext(drafter, 2, 120) for drafter in drafters]
    positions, aux = [5, 3], taps(2, 120)
    for turn in range(24):
        request = turn // 4 % 2  # each mirrored context is left and come back to
        first, count = (0, positions[request]) if turn in (0, 4) else (positions[request] - 3, 3)
        found = []
        for drafter, context in zip(drafters, contexts, strict=True):
            rows = context.batch({request: (first, count)})
            drafter.append_context(aux[request, first : first + count], rows, context.cache)
            num_rows = turn % 6 + 1
            found.append(
                propose(drafter, context, {request: (first + count, num_rows)}, torch.arange(num_rows))
            )
        assert drafters[0]._passes is not None
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
        positions[request] += 3


def test_the_context_has_the_same_bits_prepared_or_not():
    drafters = [random_drafter(native(True)), without_passes(random_drafter(native(True)))]
    caches = []
    for drafter in drafters:
        context = PagedContext(drafter, 1, 60)
        for first, count in ((0, 5), (5, 1), (6, 8), (14, 16), (30, 3)):
            rows = context.batch({0: (first, count)})
            drafter.append_context(taps(60)[first : first + count], rows, context.cache)
        caches.append(torch.stack([context.cache.storage(3, layer) for layer in range(2)]))
    assert torch.equal(*caches)


def test_another_cache_is_not_taken_for_the_one_mirrored():
    drafter = random_drafter(native(True))
    hidden = []
    for seed in (1, 1, 2):
        context = PagedContext(drafter, 1, 40)
        drafter.append_context(taps(9, seed=seed), context.batch({0: (0, 9)}), context.cache)
        hidden.append(propose(drafter, context, {0: (9, 6)}, torch.arange(6)))
    assert torch.equal(hidden[0], hidden[1])
    assert not torch.allclose(hidden[0], hidden[2], atol=1e-2)


def test_only_small_batches_of_one_request_and_one_window_run_prepared():
    drafter = random_drafter(native(True))
    drafter.pack()
    passes, context = drafter._passes, PagedContext(drafter, 2, 80)
    assert passes.prepare(context.batch({0: (0, MAX_ROWS)}), context.cache) == 0
    assert passes.prepare(context.batch({0: (0, MAX_ROWS + 1)}), context.cache) is None
    assert passes.prepare(context.batch({0: (0, 2), 1: (0, 2)}), context.cache) is None
    assert not DraftPasses.fits(random_drafter(zlab_json()).config, drafter.norm)
    assert not DraftPasses.fits(drafter.config, drafter.norm.bfloat16())
