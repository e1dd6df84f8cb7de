import pytest
import torch
import torch.nn.functional as F
from tests.unit.kernels.test_attention import Span

from lean_laguna.kernels.draft_attention import block_mask
from lean_laguna.kernels.draft_tile import BlockAttention, ContextMirror

PAGE, LAYERS, KV_HEADS, HEAD_DIM, WINDOW = 16, 2, 2, 8, 40
TABLE = tuple(range(1, 40))


@pytest.fixture
def pages(generator):
    kv = torch.randn(LAYERS, 50, PAGE, 2, KV_HEADS, HEAD_DIM, generator=generator)
    kv[:, 0] = 0
    return kv


def prepare(mirror, pages, first, rows, key, table=TABLE):
    return mirror.prepare(Span(0, rows, first, (table,)), 0, list(pages), PAGE, key)


def held(mirror, count):
    """What is held before the next row, [L, C, 2, J, P]."""
    keys, values = mirror.columns(count, 0)
    return torch.stack((torch.stack(keys).permute(0, 3, 1, 2), torch.stack(values).transpose(1, 2)), 2)


def cached(pages, lowest, first, table=TABLE):
    at = torch.arange(lowest, first)
    return pages.flatten(1, 2)[:, torch.tensor(table)[at // PAGE] * PAGE + at % PAGE]


def test_a_mirror_holds_the_window_through_rounds_of_any_length(pages):
    mirror, first = ContextMirror(LAYERS, KV_HEADS, HEAD_DIM, WINDOW), 3
    for turn in range(120):
        count = prepare(mirror, pages, first, 8, key=1)
        assert count == min(first, WINDOW - 1)
        assert torch.equal(held(mirror, count), cached(pages, first - count, first))
        mirror.seal(1)
        num_standing = turn * 5 % 8 + 1
        prepare(mirror, pages, first, num_standing, key=1)
        mirror.append(cached(pages, first, first + num_standing).transpose(0, 1))
        mirror.seal(1)
        first += num_standing


@pytest.mark.parametrize("what", ["pages written elsewhere", "another table", "not sealed"])
def test_what_may_have_changed_is_read_anew(what, pages):
    mirror = ContextMirror(LAYERS, KV_HEADS, HEAD_DIM, WINDOW)
    prepare(mirror, pages, 60, 4, key=1)
    if what != "not sealed":
        mirror.seal(1)
    table = tuple(reversed(TABLE)) if what == "another table" else TABLE
    pages.mul_(2)
    count = prepare(mirror, pages, 60, 4, key=2 if what == "pages written elsewhere" else 1, table=table)
    assert torch.equal(held(mirror, count), cached(pages, 60 - count, 60, table))


def test_a_context_with_a_page_that_is_not_kept_is_declined(pages):
    mirror = ContextMirror(LAYERS, KV_HEADS, HEAD_DIM, WINDOW)
    assert prepare(mirror, pages, 60, 4, None, table=(1, 0, *TABLE)) is None
    assert prepare(mirror, pages, 60, 4, None, table=(0, *TABLE)) == WINDOW - 1


@pytest.mark.parametrize("gate", [0, 4, 4 * HEAD_DIM])
@pytest.mark.parametrize("rows", [1, 5, 8])
def test_a_block_attends_as_torch_does(rows, gate, generator):
    joint = torch.randn(rows, 8 * HEAD_DIM + gate, generator=generator)
    attention = BlockAttention(joint, 4, KV_HEADS, HEAD_DIM, HEAD_DIM, 1e-6)
    keys = torch.randn(KV_HEADS, HEAD_DIM, 20 + rows, generator=generator)
    values = torch.randn(KV_HEADS, 20 + rows, HEAD_DIM, generator=generator)
    mask = block_mask(rows, 20, 16, True)[0, 0]
    queries = joint[:, : 4 * HEAD_DIM].view(rows, 4, HEAD_DIM).transpose(0, 1)
    expected = F.scaled_dot_product_attention(
        queries[None], keys.transpose(1, 2)[None], values[None], attn_mask=mask, enable_gqa=True
    )[0].transpose(0, 1)
    if gate:
        expected = expected * F.softplus(joint[:, 8 * HEAD_DIM :]).view(rows, 4, -1)
    found = attention.attend_to(keys, values, mask.unsqueeze(1))
    torch.testing.assert_close(found.view_as(expected), expected)
