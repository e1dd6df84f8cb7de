"""A chunk's attention equals plain attention: from pages, from ordered keys, on top of a library's part."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; it comes with PyTorch's CUDA builds")

from lean_laguna.kernels.triton.attention import AttentionShape
from lean_laguna.kernels.triton.layer_cache import LayerCache
from lean_laguna.kernels.triton.prefill_attention import attend_chunk
from lean_laguna.kernels.triton.prefill_keys import order_keys, ready_heads
from lean_laguna.kernels.triton.prefill_tiles import AttentionTile
from lean_laguna.kernels.triton.weights import rotary_tables
from support.kernel_twins import encode_values

J, P, PAGE, EPS = 2, 16, 4, 1e-6
TILE = AttentionTile(16, 16, 4, 2)
FULL = AttentionShape(num_heads=4, num_kv_heads=J, head_dim=P, rotary_dim=8)
SLIDING = AttentionShape(num_heads=2, num_kv_heads=J, head_dim=P, rotary_dim=P, window=21)
PLAIN = dataclasses.replace(SLIDING, has_gate=False, has_qk_norm=False, window=5)
CASES = [
    (FULL, 32, 23, "ordered"),
    (FULL, 9, 7, "pages"),
    (FULL, 53, 9, "past"),
    (SLIDING, 48, 19, "ordered"),
    (PLAIN, 7, 18, "ordered"),
]


@pytest.fixture
def dtype(device):
    return torch.bfloat16 if device == "cuda" else torch.float32


@pytest.mark.parametrize(("shape", "first", "n", "source"), CASES)
def test_a_chunk_attends_as_plain_attention_does(
    plain, draw, poisoned, count, device, dtype, shape, first, n, source
):
    H, end, rows = shape.num_heads, first + n, 24
    length = count(n)
    inv_freq = 10000.0 ** -(torch.arange(shape.rotary_dim // 2, device=device) / (shape.rotary_dim // 2))
    rotary = rotary_tables(inv_freq, 128, 1.1, dtype)
    norms = (draw(P) * 0.2 + 1, draw(P) * 0.2 + 1)
    table = torch.randperm(32, device=device).to(torch.int32) + 1
    cache = tuple(poisoned(33, PAGE, J, P) for _ in range(2))
    before = tuple(draw(first, J, P) for _ in range(2))
    lowest = max(0, first - shape.window + 1) if shape.window else 0
    at = torch.arange(lowest, first, device=device)
    for pages, kept in zip(cache, before, strict=True):
        pages[table[at // PAGE].long(), at % PAGE] = kept[lowest:]
    qkv, out = poisoned(rows, shape.width), poisoned(rows, H * P)
    qkv[:n] = draw(n, shape.width)
    q, k, v, gate = qkv[:n].clone().split([H * P, J * P, J * P, H * shape.has_gate], -1)
    positions = torch.arange(first, end, device=device)
    cos, sin = (t[positions] for t in rotary)
    q, k, v = q.reshape(n, H, P), k.reshape(n, J, P), v.reshape(n, J, P)
    if shape.has_qk_norm:
        q, k = plain.rms_norm(q, norms[0], EPS), plain.rms_norm(k, norms[1], EPS)
    q, k = plain.rotate(q, cos, sin), plain.rotate(k, cos, sin)
    keys, values = torch.cat((before[0], k)), torch.cat((before[1], v))

    ready_heads(qkv, norms, rotary, cache, table, shape, count(first), length, eps=EPS)
    past, past_keys, taken = None, 0, cache
    if source != "pages":
        taken = tuple(poisoned(128, J, P) for _ in range(2))
        order_keys(cache, table, taken, shape, count(first), length, first + rows, TILE)
    if source == "past":
        # What a library would have found, the whole padded chunk's.
        past_keys = first // 32 * 32
        old = keys[:past_keys].float().repeat_interleave(H // J, 1)
        scores = torch.einsum("thp,shp->hts", q.float(), old) * P**-0.5
        old_values = values[:past_keys].float().repeat_interleave(H // J, 1)
        past = (poisoned(H, rows, P), poisoned(H, rows, of=torch.float32))
        past[0][:, :n] = torch.einsum("hts,shp->htp", scores.softmax(-1), old_values).to(dtype)
        past[1][:, :n] = scores.logsumexp(-1)
        for ordered in taken:
            ordered[:past_keys] = float("nan")
    own = (qkv, out, taken, table, shape, count(first), length, TILE)
    attend_chunk(*own, is_ordered=source != "pages", past=past, past_keys=past_keys)

    expected = plain.attention(q, keys, values, positions, window=shape.window)
    if shape.has_gate:
        opened = torch.nn.functional.softplus(gate.float()).to(dtype)
        expected = (expected.float() * opened.float()[..., None]).to(dtype)
    bound = 2e-5 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(out[:n], expected.reshape(n, -1), atol=bound, rtol=bound)
    assert out[n:].isnan().all()
    for pages, new in zip(cache, (k, v), strict=True):
        found = pages[table[positions // PAGE].long(), positions % PAGE]
        torch.testing.assert_close(found, new, atol=bound, rtol=bound)


@pytest.mark.parametrize("window", [7, 0])
def test_ordered_keys_end_in_zeros(draw, device, poisoned, count, dtype, window):
    shape = dataclasses.replace(FULL, window=window)
    cache = tuple(poisoned(9, PAGE, J, P) for _ in range(2))
    table = torch.randperm(8, device=device).to(torch.int32) + 1
    lowest, begin = (18, 16) if window else (0, 0)
    want = draw(27 - lowest, J, P)
    at = torch.arange(lowest, 27, device=device)
    for pages in cache:
        pages[table[at // PAGE].long(), at % PAGE] = want
    ordered = tuple(poisoned(40, J, P) for _ in range(2))
    order_keys(cache, table, ordered, shape, count(24), count(3), 27 - begin, TILE)
    whole = (27 - begin + 15) // 16 * 16
    for found in ordered:
        assert torch.equal(found[lowest - begin : 27 - begin], want)
        assert not found[: lowest - begin].any()
        assert not found[27 - begin : whole].any()
        assert found[whole:].isnan().all()


def test_later_keys_are_ordered_behind_those_before(draw, device, poisoned, count, dtype):
    cache = tuple(draw(13, PAGE, J, P) for _ in range(2))
    table = torch.randperm(12, device=device).to(torch.int32) + 1
    ordered = tuple(poisoned(64, J, P) for _ in range(2))
    order_keys(cache, table, ordered, FULL, count(40), count(3), 19, TILE, is_after=True)
    at = torch.arange(32, 43, device=device)
    for found, pages in zip(ordered, cache, strict=True):
        assert found[:32].isnan().all()
        assert torch.equal(found[32:43], pages[table[at // PAGE].long(), at % PAGE])
        assert not found[43:48].any()
        assert found[48:].isnan().all()


@pytest.mark.parametrize(("shape", "first", "n"), [(FULL, 9, 7), (SLIDING, 48, 19)])
def test_pages_of_codes_are_read_as_the_numbers_they_stand_for(
    draw, poisoned, count, device, dtype, shape, first, n
):
    rows, length, scales = 24, count(n), (0.02, 0.003)
    inv_freq = 10000.0 ** -(torch.arange(shape.rotary_dim // 2, device=device) / (shape.rotary_dim // 2))
    rotary = rotary_tables(inv_freq, 128, 1.1, dtype)
    norms = (draw(P) * 0.2 + 1, draw(P) * 0.2 + 1)
    table = torch.randperm(32, device=device).to(torch.int32) + 1
    qkv = poisoned(rows, shape.width)
    qkv[:n] = draw(n, shape.width)
    at = torch.arange(first, first + n, device=device)
    plain = tuple(draw(33, PAGE, J, P) for _ in range(2))
    kept = [encode_values(pages, s) for pages, s in zip(plain, scales, strict=True)]
    coded = LayerCache(*kept, *scales)
    again = qkv.clone()
    ready_heads(again, norms, rotary, coded, table, shape, count(first), length, eps=EPS)
    ready_heads(qkv, norms, rotary, plain, table, shape, count(first), length, eps=EPS)
    for pages, codes, scale in zip(plain, kept, scales, strict=True):
        new = pages[table[at // PAGE].long(), at % PAGE]
        found = codes[table[at // PAGE].long(), at % PAGE].float()
        # As numbers: the kernel keeps no sign of what it rounds to zero.
        assert torch.equal(found, encode_values(new, scale).float())
        assert (found.abs() == 448).any() or scale > 0.01  # some are cut off
    numbers = tuple((codes.float() * s).to(dtype) for codes, s in zip(kept, scales, strict=True))
    found = []
    for cache in (coded, numbers):
        ordered = tuple(poisoned(128, J, P) for _ in range(2))
        order_keys(cache, table, ordered, shape, count(first), length, first + rows, TILE)
        for taken in (ordered, cache):
            out = poisoned(rows, shape.num_heads * P)
            own = (qkv, out, taken, table, shape, count(first), length, TILE)
            attend_chunk(*own, is_ordered=taken is ordered)
            found.append(out[:n])
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


@pytest.mark.parametrize(("first", "num_parts"), [(250, 1), (300, 2), (1100, 3)])
def test_parts_of_the_keys_before_a_chunk_add_up(draw, poisoned, count, device, dtype, first, num_parts):
    n, rows, page = 5, 24, 64
    table = torch.randperm(20, device=device).to(torch.int32) + 1
    cache = tuple(draw(21, page, J, P) for _ in range(2))
    qkv = poisoned(rows, FULL.width)
    qkv[:n] = draw(n, FULL.width)
    found = []
    for parts in (None, poisoned(3, rows, FULL.num_heads, P + 2, of=torch.float32)):
        out = poisoned(rows, FULL.num_heads * P)
        attend_chunk(qkv, out, cache, table, FULL, count(first), count(n), TILE, parts=parts)
        assert out[n:].isnan().all()
        found.append(out[:n])
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(*found, atol=bound, rtol=bound)
    written = parts.view(-1).isfinite().sum().item() // (n * FULL.num_heads * (P + 2))
    assert written == (num_parts if num_parts > 1 else 0)
