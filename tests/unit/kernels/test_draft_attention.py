import math
from dataclasses import dataclass

import pytest
import torch

from lean_laguna.kernels.draft_attention import block_attention, plan_block_attention

PAGE, GROUP = 4, 1


@dataclass(frozen=True)
class Span:
    start: int
    num_rows: int
    first_position: int
    block_tables: tuple[tuple[int, ...], ...]


def spans_of(blocks, tables):
    spans, start = [], 0
    for (anchor, rows), table in zip(blocks, tables, strict=True):
        spans.append(Span(start, rows, anchor, ((), tuple(table))))
        start += rows
    return spans


def naive(q, own, kv, spans, window, causal, scale):
    """One query, one head, one key at a time."""
    groups = q.shape[1] // own.shape[2]
    out = torch.zeros_like(q)
    for span in spans:
        for r in range(span.num_rows):
            at = span.first_position + r
            keys, values = [], []
            for position in range(span.first_position):
                page = span.block_tables[GROUP][position // PAGE]
                if page and (window is None or at - position < window):
                    keys.append(kv[page, position % PAGE, 0])
                    values.append(kv[page, position % PAGE, 1])
            for other in range(span.num_rows):
                near = window is None or abs(r - other) < window
                if near and (other <= r or not causal):
                    keys.append(own[span.start + other, 0])
                    values.append(own[span.start + other, 1])
            for head in range(q.shape[1]):
                k = torch.stack(keys)[:, head // groups]
                v = torch.stack(values)[:, head // groups]
                weights = (k @ q[span.start + r, head] * scale).softmax(0)
                out[span.start + r, head] = weights @ v
    return out


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
@pytest.mark.parametrize(
    "blocks", [[(9, 4)], [(9, 4), (2, 4), (16, 4)], [(5, 2), (17, 5), (1, 1), (12, 3)]], ids=str
)
def test_each_row_sees_its_window_of_context_and_its_own_block(blocks, window, causal):
    generator = torch.Generator().manual_seed(1)
    tables = [torch.randperm(6, generator=generator).add(1 + 6 * i).tolist() for i in range(len(blocks))]
    spans = spans_of(blocks, tables)
    rows = sum(count for _, count in blocks)
    q = torch.randn(rows, 4, 8, generator=generator)
    own = torch.randn(rows, 2, 2, 8, generator=generator)
    kv = torch.randn(1 + 6 * len(blocks), PAGE, 2, 2, 8, generator=generator)
    kv[0] = 0
    plan = plan_block_attention(spans, GROUP, PAGE, window=window, causal=causal)
    found = block_attention(q, own, kv, plan, 0.3)
    # float32 sums of at most 22 terms of size 1
    torch.testing.assert_close(found, naive(q, own, kv, spans, window, causal, 0.3), rtol=1e-5, atol=1e-5)


def test_what_lies_in_pages_outside_the_context_never_matters():
    generator = torch.Generator().manual_seed(2)
    spans = spans_of([(6, 3)], [[3, 1, 2]])
    q, own = torch.randn(3, 2, 8, generator=generator), torch.randn(3, 2, 2, 8, generator=generator)
    kv = torch.full((4, PAGE, 2, 2, 8), math.nan)
    kv[0] = 0
    kv[3], kv[1, :2] = (torch.randn(n, 2, 2, 8, generator=generator) for n in (PAGE, 2))
    plan = plan_block_attention(spans, GROUP, PAGE, window=None, causal=True)
    assert torch.isfinite(block_attention(q, own, kv, plan, 1.0)).all()


def test_context_in_the_null_page_is_not_seen():
    generator = torch.Generator().manual_seed(3)
    q, own = torch.randn(2, 2, 8, generator=generator), torch.randn(2, 2, 2, 8, generator=generator)
    kv = torch.randn(4, PAGE, 2, 2, 8, generator=generator)
    kv[0] = 0
    spans = spans_of([(7, 2)], [[0, 2]])
    plan = plan_block_attention(spans, GROUP, PAGE, window=None, causal=False)
    found = block_attention(q, own, kv, plan, 1.0)
    torch.testing.assert_close(found, naive(q, own, kv, spans, None, False, 1.0), rtol=1e-5, atol=1e-5)


def test_rows_beyond_the_plan_come_back_as_zeros():
    q, own = torch.randn(8, 2, 8), torch.randn(8, 2, 2, 8)
    plan = plan_block_attention(spans_of([(0, 5)], [[1]]), GROUP, PAGE, window=None, causal=True)
    found = block_attention(q, own, torch.zeros(2, PAGE, 2, 2, 8), plan, 1.0)
    assert found.shape == q.shape
    assert not found[5:].any()
