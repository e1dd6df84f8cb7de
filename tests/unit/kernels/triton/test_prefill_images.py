"""Keys and values come out of their pages as the images that warpgroups read."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; it comes with PyTorch's CUDA builds")

from lean_laguna.kernels.triton.attention import AttentionShape
from lean_laguna.kernels.triton.prefill_images import lay_images
from support.prompt_images import images_of

J, P, PAGE = 2, 128, 16
FULL = AttentionShape(num_heads=4, num_kv_heads=J, head_dim=P, rotary_dim=64)
SLIDING = AttentionShape(num_heads=4, num_kv_heads=J, head_dim=P, rotary_dim=P, window=128)


@pytest.mark.parametrize(
    ("shape", "first", "n", "lowest", "is_after"),
    [
        (FULL, 128, 75, 0, False),
        (FULL, 256, 128, 256, True),
        (SLIDING, 384, 130, 256, False),
        (SLIDING, 0, 9, 0, False),
    ],
)
def test_images_hold_every_key_of_a_block_and_before(device, count, shape, first, n, lowest, is_after):
    end = first + n
    table = torch.randperm(48, device=device).to(torch.int32) + 1
    of = {"dtype": torch.bfloat16, "device": device}
    cache = tuple(torch.full((49, PAGE, J, P), float("nan"), **of) for _ in range(2))
    drawn = [torch.randn(end, J, P, device=device).to(torch.bfloat16) for _ in cache]
    at = torch.arange(lowest, end, device=device)
    for pages, kept in zip(cache, drawn, strict=True):
        pages[table[at // PAGE].long(), at % PAGE] = kept[lowest:]
    whole = -(-end // 128) * 128
    padded = [torch.cat((t, torch.zeros(whole - end, J, P, **of))) for t in drawn]
    if shape.window and lowest:  # nobody sees the first
        for drawn_part, pages in zip(padded, cache, strict=True):
            drawn_part[lowest] = 0
            pages[table[lowest // PAGE].long(), lowest % PAGE] = float("nan")
    images = tuple(torch.full((whole + 128, J, P), 7.0, **of) for _ in range(2))
    begin = lowest if is_after else 0
    lay_images(cache, table, images, shape, count(first), count(n), end - lowest, is_after=is_after)
    for image, want in zip(images, images_of(*(t[lowest:] for t in padded)), strict=True):
        assert torch.equal(image[begin : begin + whole - lowest], want)
        assert (image[begin + whole - lowest :] == 7).all()
        assert (image[:begin] == 7).all()
