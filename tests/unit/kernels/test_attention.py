from dataclasses import dataclass

import pytest
import torch

from lean_laguna.kernels import attention_plan as module
from lean_laguna.kernels.attention import paged_attention, store_kv
from lean_laguna.kernels.attention_plan import ATTN_CHUNK, Tiles, plan_attention

PAGE, KV_HEADS, HEAD_DIM = 16, 2, 8


@dataclass(frozen=True)
class Span:
    start: int
    num_rows: int
    first_position: int
    block_tables: tuple[tuple[int, ...], ...]


class Case:
    """One sequence of random keys and values in shuffled pages; what is not written is NaN."""

    def __init__(self, length, heads, window, generator, scale=1.0):
        self.length, self.heads, self.window = length, heads, window
        self.q = scale * torch.randn(length, heads, HEAD_DIM, generator=generator)
        self.k, self.v = (
            scale * torch.randn(length, KV_HEADS, HEAD_DIM, generator=generator) for _ in range(2)
        )
        count = -(-length // PAGE)
        self.table = tuple((1 + torch.randperm(count, generator=generator)).tolist())

    def storage(self, written):
        kv = torch.full((len(self.table) + 1, PAGE, 2, KV_HEADS, HEAD_DIM), float("nan"))
        kv[0] = 0
        at = torch.arange(written)
        slots = torch.tensor(self.table)[at // PAGE] * PAGE + at % PAGE
        kv.flatten(0, 1)[slots] = torch.stack((self.k[:written], self.v[:written]), 1)
        return kv

    def rows(self, first, count):
        span = Span(0, count, first, (self.table,))
        plan = plan_attention(Tiles([span]), 0, PAGE, KV_HEADS, HEAD_DIM, self.window)
        return paged_attention(self.q[first : first + count], self.storage(first + count), plan, 0.3)

    def expected(self):
        groups = self.heads // KV_HEADS
        k, v = (rows.double().repeat_interleave(groups, 1) for rows in (self.k, self.v))
        scores = 0.3 * torch.einsum("qhp,khp->hqk", self.q.double(), k)
        at = torch.arange(self.length)
        hidden = at[None] > at[:, None]
        if self.window is not None:
            hidden = hidden | (at[:, None] - at[None] >= self.window)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khp->qhp", weights, v)


CASES = [(200, 4, None), (200, 6, 24), (200, 2, 100), (67, 4, 1), (1, 4, None), (65, 4, 64)]


@pytest.mark.parametrize(("length", "heads", "window"), CASES)
def test_it_attends(length, heads, window, generator):
    case = Case(length, heads, window, generator)
    # float32 against float64; outputs are averages of N(0, 1).
    torch.testing.assert_close(case.rows(0, length).double(), case.expected(), rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize(("length", "heads", "window"), CASES)
def test_any_rows_at_once_have_the_bits_of_one_by_one(length, heads, window, generator):
    case = Case(length, heads, window, generator, scale=3.0)
    alone = torch.cat([case.rows(i, 1) for i in range(length)])
    assert torch.isfinite(alone).all()
    assert torch.equal(case.rows(0, length), alone)
    for count in range(1, 17):
        for first in {0, 55, 63, 64, 120, length - count}:
            if 0 <= first <= length - count:
                assert torch.equal(case.rows(first, count), alone[first : first + count]), (first, count)


def test_sequences_of_a_batch_do_not_touch_each_other(generator):
    cases = [Case(length, 4, 40, generator, scale) for length, scale in ((150, 1.0), (90, 1e4), (16, 1.0))]
    takes = [(140, 3), (70, 20), (0, 16)]
    expected = [case.rows(first, count) for case, (first, count) in zip(cases, takes, strict=True)]
    storages = [case.storage(first + count) for case, (first, count) in zip(cases, takes, strict=True)]
    for order in ((0, 1, 2), (2, 0, 1), (1, 0)):
        spans, parts, start, base = [], [torch.zeros(1, PAGE, 2, KV_HEADS, HEAD_DIM)], 0, 1
        for i in order:
            first, count = takes[i]
            table = tuple(block - 1 + base for block in cases[i].table)
            spans.append(Span(start, count, first, (table,)))
            parts.append(storages[i][1:])
            base += len(table)
            start += count
        q = torch.cat([cases[i].q[takes[i][0] : sum(takes[i])] for i in order])
        plan = plan_attention(Tiles(spans), 0, PAGE, KV_HEADS, HEAD_DIM, 40)
        found = paged_attention(q, torch.cat(parts), plan, 0.3)
        assert torch.equal(found, torch.cat([expected[i] for i in order]))


def test_tiles_that_do_not_fit_together_are_cut_without_a_trace(monkeypatch, generator):
    case = Case(600, 4, None, generator)
    whole = case.rows(0, 600)
    monkeypatch.setattr(module, "_MAX_GATHERED", 2 * KV_HEADS * HEAD_DIM * ATTN_CHUNK)
    assert torch.equal(case.rows(0, 600), whole)


@pytest.mark.parametrize("chunks", [15, 16, 17, 33])
def test_contexts_of_many_chunks_do_not_depend_on_how_far_the_tile_reaches(chunks, generator):
    length = chunks * ATTN_CHUNK + 9
    case = Case(length, 2, None, generator)
    first = chunks * ATTN_CHUNK - 3
    block = case.rows(first, 12)
    alone = torch.cat([case.rows(first + i, 1) for i in range(12)])
    assert torch.equal(block, alone)


def test_padding_beyond_the_rows_is_finite(generator):
    case = Case(30, 4, None, generator)
    plan = plan_attention(Tiles([Span(0, 3, 20, (case.table,))]), 0, PAGE, KV_HEADS, HEAD_DIM, None)
    padded = torch.cat((case.q[20:23], case.q[22:23].expand(5, -1, -1)))
    out = paged_attention(padded, case.storage(23), plan, 0.3)
    assert out.shape == padded.shape
    assert torch.isfinite(out).all()
    assert torch.equal(out[:3], case.rows(20, 3))


def test_pages_out_of_the_window_need_not_be_kept(generator):
    case = Case(100, 4, 20, generator)
    expected = case.rows(90, 4)
    table = tuple(0 if i < 4 else block for i, block in enumerate(case.table))
    plan = plan_attention(Tiles([Span(0, 4, 90, (table,))]), 0, PAGE, KV_HEADS, HEAD_DIM, 20)
    assert torch.equal(paged_attention(case.q[90:94], case.storage(94), plan, 0.3), expected)


def test_a_visible_page_that_is_not_kept_is_an_error(generator):
    case = Case(100, 4, 20, generator)
    table = tuple(0 if i == 5 else block for i, block in enumerate(case.table))
    with pytest.raises(ValueError, match="not kept"):
        plan_attention(Tiles([Span(0, 4, 90, (table,))]), 0, PAGE, KV_HEADS, HEAD_DIM, 20)


def test_own_slots_name_kept_rows_only():
    plan = plan_attention(Tiles([Span(0, 2, 32, ((0, 0, 7),))]), 0, 16, 1, 8, 1)
    assert plan.slots.tolist() == [7 * 16, 7 * 16 + 1]
    assert plan.kept_rows is None


@pytest.mark.parametrize(("length", "heads", "window"), [(70, 4, None), (70, 6, 24)])
def test_codes_of_an_fp8_cache_are_scaled_and_saturate(length, heads, window, generator):
    case = Case(length, heads, window, generator, scale=4.0)
    scales = (0.02, 0.005)  # values beyond 448 * 0.005 = 2.24 are cut off
    plan = plan_attention(Tiles([Span(0, length, 0, (case.table,))]), 0, PAGE, KV_HEADS, HEAD_DIM, window)
    kv = torch.zeros(len(case.table) + 1, PAGE, 2, KV_HEADS, HEAD_DIM).to(torch.float8_e4m3fn)
    store_kv(torch.cat((case.k.flatten(1), case.v.flatten(1)), 1), kv, plan.slots, scales)
    found = paged_attention(case.q, kv, plan, 0.3, scales)

    def kept(values, scale):
        return (values / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale

    case.k, case.v = kept(case.k, scales[0]), kept(case.v, scales[1])
    assert case.v.abs().max() == torch.tensor(448 * scales[1])
    assert torch.allclose(found[:length].double(), case.expected(), rtol=1e-4, atol=1e-5)
