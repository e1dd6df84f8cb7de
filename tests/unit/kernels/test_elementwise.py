import pytest
import torch
import torch.nn.functional as F

from lean_laguna.kernels import elementwise
from lean_laguna.kernels.elementwise import (
    add_up,
    apply_rotary,
    rms_norm,
    rms_scale,
    rms_scale_,
    rotate_,
    sigmoid,
    silu_and_mul,
    softcap,
    softplus,
)

# Below, at and beyond torch's vector loop, odd ones, and rows longer than a call may be.
WIDTHS = [1, 3, 8, 12, 16, 31, 32, 33, 48, 100, 256, 4099, 33_000]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    "function",
    [softplus, sigmoid, lambda x: softcap(x, 0.7), silu_and_mul, lambda x: rms_scale(x, 1e-6)],
    ids=["softplus", "sigmoid", "softcap", "silu_and_mul", "rms_scale"],
)
def test_a_row_has_the_same_bits_alone_and_anywhere(function, width, generator):
    rows = 3 * torch.randn(18, 2 * width if function is silu_and_mul else width, generator=generator)
    alone = torch.cat([function(row[None]) for row in rows])
    for count in (1, 2, 7, 8, 9, 16, 18):
        assert torch.equal(function(rows[-count:]), alone[-count:])
    wide = F.pad(rows, (3, 5))
    assert torch.equal(function(wide[:, 3:-5]), alone)


def test_calls_that_torch_would_cut_between_threads_keep_their_bits(generator):
    rows = 3 * torch.randn(1500, 2 * 39, generator=generator)
    alone = torch.cat([silu_and_mul(row[None]) for row in rows])
    for threads in (1, 2, 3):
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(threads)
            assert torch.equal(silu_and_mul(rows), alone)
        finally:
            torch.set_num_threads(before)


def test_grouped_rows_keep_their_bits(generator):
    bank = torch.randn(3, 8, 2 * 13, generator=generator)
    whole = silu_and_mul(bank)
    for i in range(3):
        assert torch.equal(silu_and_mul(bank[i]), whole[i])


def test_functions_are_what_they_are_called(generator):
    x = 4 * torch.randn(8, 50, generator=generator)
    # One or two float32 roundings apart.
    close = {"rtol": 3e-6, "atol": 1e-6}
    torch.testing.assert_close(silu_and_mul(x), F.silu(x[:, :25]) * x[:, 25:], **close)
    torch.testing.assert_close(softplus(x), F.softplus(x), **close)
    torch.testing.assert_close(sigmoid(x), torch.sigmoid(x), **close)
    torch.testing.assert_close(softcap(x, 2.0), torch.tanh(x / 2) * 2, **close)
    weight = torch.randn(50, generator=generator)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), F.rms_norm(x, (50,), weight, 1e-6), **close)
    strided = F.pad(x, (2, 2))[:, 2:-2]
    torch.testing.assert_close(rms_scale_(strided, 1e-6), F.rms_norm(x, (50,), eps=1e-6), **close)


def test_softplus_is_linear_above_twenty():
    assert torch.equal(softplus(torch.tensor([[21.0, 50.0]])), torch.tensor([[21.0, 50.0]]))


def test_norms_of_bfloat16_round_before_the_weight(generator):
    x, weight = (
        torch.randn(4, 64, generator=generator).bfloat16(),
        torch.rand(64, generator=generator).bfloat16(),
    )
    wide = x.float()
    inner = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).bfloat16()
    assert torch.equal(rms_norm(x, weight, 1e-6), inner * weight)
    assert torch.equal(rms_scale_(x.clone(), 1e-6), inner)


@pytest.mark.parametrize("rotary", [2, 6, 8])
def test_rotation_turns_pairs_and_passes_the_rest(rotary, generator):
    x = torch.randn(5, 3, 8, generator=generator)
    angle = torch.rand(5, rotary // 2, generator=generator)
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    found = apply_rotary(x, cos, sin)
    half = rotary // 2
    pair = torch.complex(x[..., :half], x[..., half:rotary]) * torch.polar(torch.ones(()), angle)[:, None]
    # One rounding of each product and sum.
    torch.testing.assert_close(found[..., :half], pair.real, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[..., half:rotary], pair.imag, rtol=1e-5, atol=1e-6)
    assert torch.equal(found[..., rotary:], x[..., rotary:])
    signed = torch.cat((-sin[:, :half], sin[:, half:]), -1)
    in_place = x.clone()
    assert rotate_(in_place, cos[:, None], signed[:, None]) is in_place
    assert torch.equal(in_place, found)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 300])
def test_rotation_keeps_bits_in_any_batch(count, generator):
    x = torch.randn(300, 5, 10, generator=generator)
    angle = torch.rand(300, 3, generator=generator)
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    whole = apply_rotary(x, cos, sin)
    assert torch.equal(apply_rotary(x[-count:], cos[-count:], sin[-count:]), whole[-count:])


def test_numbers_as_tensors_can_be_used_with_gradients():
    elementwise.scalar.cache_clear()
    with torch.inference_mode():
        elementwise.scalar(0.5)
    x = torch.ones(2, requires_grad=True)
    (x * elementwise.scalar(0.5)).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 0.5))


@pytest.mark.parametrize("columns", [1, 20, 40, 64, 80, 192, 1000])
@pytest.mark.parametrize("terms", [1, 3, 6, 16, 17, 40])
def test_terms_are_added_in_their_order_in_every_column(columns, terms, generator):
    x = torch.randn(3, terms, columns, generator=generator)
    expected = x[:, 0].clone()
    for i in range(1, terms):
        expected += x[:, i]
    assert torch.equal(add_up(x, torch.empty(3, columns)), expected)
    assert torch.equal(add_up(x[1:2], torch.empty(1, columns)), expected[1:2])
