"""A block's keys go to their pages, and all that it sees into the images that warpgroups read."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; it comes with PyTorch's CUDA builds")

from lean_laguna.kernels.triton.attention import AttentionShape
from lean_laguna.kernels.triton.prefill_images import lay_images
from lean_laguna.kernels.triton.weights import rotary_tables
from support.prompt_images import images_of

J, P, PAGE, EPS = 2, 128, 16, 1e-6
FULL = AttentionShape(num_heads=4, num_kv_heads=J, head_dim=P, rotary_dim=64)
SLIDING = AttentionShape(num_heads=4, num_kv_heads=J, head_dim=P, rotary_dim=P, window=128)


@pytest.mark.parametrize(
    ("shape", "first", "n", "lowest", "is_after"),
    [
        (FULL, 128, 75, 0, False),
        (FULL, 256, 128, 256, True),
        (SLIDING, 384, 130, 256, False),
        (dataclasses.replace(SLIDING, has_qk_norm=False), 0, 9, 0, False),
    ],
)
def test_a_blocks_keys_are_kept_and_images_hold_all_there_are(
    plain, device, count, shape, first, n, lowest, is_after
):
    of, end, whole = {"dtype": torch.bfloat16, "device": device}, first + n, -(-(first + n) // 128) * 128
    table = torch.randperm(48, device=device).to(torch.int32) + 1
    cache = tuple(torch.full((49, PAGE, J, P), float("nan"), **of) for _ in range(2))
    before = [torch.randn(first, J, P, device=device).to(torch.bfloat16) for _ in cache]
    seen = lowest + 1 if shape.window and lowest else lowest  # nobody sees the first of a window's image
    at = torch.arange(seen, first, device=device)
    for pages, kept in zip(cache, before, strict=True):
        pages[table[at // PAGE].long(), at % PAGE] = kept[seen:]
    qkv = torch.randn(n + 3, shape.width, device=device).to(torch.bfloat16)
    norm = torch.rand(P, device=device).to(torch.bfloat16) + 0.5
    inv_freq = 10000.0 ** -(torch.arange(shape.rotary_dim // 2, device=device) / (shape.rotary_dim // 2))
    rotary = rotary_tables(inv_freq, 1024, 1.1, torch.bfloat16)
    images = tuple(torch.full((whole + 128, J, P), 7.0, **of) for _ in range(2))

    own = (cache, table, images, shape, count(first), count(n), end - lowest)
    lay_images(qkv, norm, rotary, *own, eps=EPS, is_after=is_after)

    k, v = qkv[:n, shape.num_heads * P :].split([J * P, shape.width - (shape.num_heads + J) * P], -1)
    k, v = k.reshape(n, J, P), v[:, : J * P].reshape(n, J, P)
    k = plain.rms_norm(k, norm, EPS) if shape.has_qk_norm else k
    k = plain.rotate(k, *(t[first:end] for t in rotary))
    at, found = torch.arange(first, end, device=device), []
    for pages, own_part, old in zip(cache, (k, v), before, strict=True):
        written = pages[table[at // PAGE].long(), at % PAGE]
        torch.testing.assert_close(written, own_part, atol=7e-2, rtol=2e-2)
        found.append(torch.cat((old, written, torch.zeros(whole - end, J, P, **of)))[lowest:])
        found[-1][: seen - lowest] = 0
    begin = lowest if is_after else 0
    for image, want in zip(images, images_of(*found), strict=True):
        assert torch.equal(image[begin : begin + whole - lowest], want)
        assert (image[begin + whole - lowest :] == 7).all()
        assert (image[:begin] == 7).all()
