import pytest
import torch
from tests.unit.kernels.test_attention import Span

from lean_laguna.kernels.attention_plan import ATTN_CHUNK, Tiles, plan_attention
from lean_laguna.kernels.kv_mirror import KVMirror, Piece, TilePlan, cut

PAGE, KV_HEADS, HEAD_DIM = 16, 2, 8
TABLE = tuple(range(1, 21))


@pytest.fixture
def pages(generator):
    kv = torch.randn(2, 30, PAGE, 2, KV_HEADS, HEAD_DIM, generator=generator)
    kv[:, 0] = 0
    return kv


def plan_of(first, rows, window=None, height=16, table=TABLE):
    return TilePlan.of(Span(0, rows, first, (table,)), 0, PAGE, window, height)


def seen(mirror, layer, plan):
    """Keys and values [n, J, P] of the positions that the plan's rows see before its own."""
    keys = mirror.keys[layer].view(KV_HEADS, -1, HEAD_DIM, ATTN_CHUNK).permute(1, 3, 0, 2).flatten(0, 1)
    values = mirror.values[layer].view(KV_HEADS, -1, HEAD_DIM).transpose(0, 1)
    part = slice(plan.lowest - plan.begin, plan.first - plan.begin)
    return torch.stack((keys[part], values[part]), 1)


def cached(pages, layer, plan, table=TABLE):
    at = torch.arange(plan.lowest, plan.first)
    return pages[layer].flatten(0, 1)[torch.tensor(table)[at // PAGE] * PAGE + at % PAGE]


@pytest.mark.parametrize("window", [None, 1, 20, 70, 200])
@pytest.mark.parametrize(("first", "rows"), [(0, 1), (0, 8), (63, 1), (60, 8), (130, 3), (191, 8)])
def test_a_tile_sees_what_the_same_rows_see_in_any_batch(window, first, rows):
    span = Span(0, rows, first, (TABLE,))
    any_batch = plan_attention(Tiles([span]), 0, PAGE, KV_HEADS, HEAD_DIM, window)
    plan = plan_of(first, rows, window, height=8)
    slots = [piece.at + i for piece in plan.slots for i in range(piece.count)]
    assert slots == any_batch.slots.tolist()
    (tiles,) = any_batch.batches
    assert plan.num_chunks == tiles.num_chunks
    assert torch.equal(plan.mask, tiles.mask.view(8, 1, plan.num_chunks, ATTN_CHUNK))


def test_a_position_that_is_seen_and_not_kept_is_an_error():
    table = (0, 2, 3)
    with pytest.raises(ValueError, match="not kept"):
        plan_of(20, 1, None, table=table)
    assert plan_of(20, 1, 5, table=table).lowest == 16
    with pytest.raises(ValueError, match="not kept"):
        plan_of(20, 1, 6, table=table)


def test_rows_are_cut_where_blocks_begin():
    assert cut(14, 20, 16) == [Piece(0, 2, 14), Piece(2, 16, 16), Piece(18, 2, 32)]


def test_a_mirror_follows_a_sequence_over_windows_chunks_and_rejected_rows(pages, generator):
    mirror, other = KVMirror(2, KV_HEADS, HEAD_DIM), KVMirror(2, KV_HEADS, HEAD_DIM)
    first = 50
    for rows, kept in ((1, 1), (8, 3), (1, 1), (16, 16), (8, 1), (2, 2)) * 8:
        plan = plan_of(first, rows, 90)
        mirror.prepare(plan, pages, PAGE, "same")
        other.prepare(plan, pages, PAGE, None)
        for layer in range(2):
            own = torch.randn(16, 2, KV_HEADS, HEAD_DIM, generator=generator)
            for piece in plan.slots:
                pages[layer].flatten(0, 1)[piece.at : piece.at + piece.count] = own[piece.row :][
                    : piece.count
                ]
            for one in (mirror, other):
                one.write(layer, own[:, 0].permute(1, 2, 0), own[:, 1].transpose(0, 1))
        mirror.seal("same")
        after = plan_of(first + rows, 1, rows + 90)
        assert after.lowest >= plan.lowest or first < 90
        for layer in range(2):
            assert torch.equal(seen(mirror, layer, plan), cached(pages, layer, plan))
            own = slice(first - plan.begin, first + rows - plan.begin)
            for name in ("keys", "values"):
                ours, theirs = (getattr(one, name)[layer] for one in (mirror, other))
                ours, theirs = (x.view(KV_HEADS, plan.num_chunks, *x.shape[1:]) for x in (ours, theirs))
                if name == "keys":
                    ours, theirs = ours.transpose(2, 3), theirs.transpose(2, 3)
                assert torch.equal(ours.flatten(1, 2)[:, own], theirs.flatten(1, 2)[:, own])
        first += kept


@pytest.mark.parametrize("change", ["key", "table", "position"])
def test_a_mirror_is_filled_anew_when_anything_else_may_have_happened(change, pages, generator):
    mirror = KVMirror(2, KV_HEADS, HEAD_DIM)
    mirror.prepare(plan_of(40, 1), pages, PAGE, 0)
    mirror.write(0, torch.zeros(KV_HEADS, HEAD_DIM, 16), torch.zeros(KV_HEADS, 16, HEAD_DIM))
    mirror.seal(0)
    pages[:, 1:] = torch.randn(pages[:, 1:].shape, generator=generator)
    table = (1, 9, *TABLE[2:]) if change == "table" else TABLE
    plan = plan_of(45 if change == "position" else 41, 1, table=table)
    mirror.prepare(plan, pages, PAGE, int(change == "key"))
    assert torch.equal(seen(mirror, 1, plan), cached(pages, 1, plan, table))


def test_a_step_that_failed_leaves_a_mirror_that_is_not_trusted(pages, generator):
    mirror = KVMirror(2, KV_HEADS, HEAD_DIM)
    mirror.prepare(plan_of(40, 1), pages, PAGE, 0)
    mirror.seal(0)
    mirror.prepare(plan_of(41, 1), pages, PAGE, 0)  # and no seal
    pages[:, 1:] = torch.randn(pages[:, 1:].shape, generator=generator)
    plan = plan_of(41, 1)
    mirror.prepare(plan, pages, PAGE, 0)
    assert torch.equal(seen(mirror, 0, plan), cached(pages, 0, plan))


def test_what_nobody_sees_never_enters_a_mirror(pages):
    pages[:, 7:] = float("nan")
    mirror = KVMirror(2, KV_HEADS, HEAD_DIM)
    mirror.prepare(plan_of(7 * PAGE - PAGE, 1), pages, PAGE, 0)
    assert all(torch.isfinite(part).all() for part in (*mirror.keys, *mirror.values))
