"""A weight to a checkpoint's tensors and back, under every scheme."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lean_laguna.core.errors import ConfigError
from lean_laguna.quant.codec import encode, to_packed
from lean_laguna.quant.presets import PRESETS
from lean_laguna.quant.scheme import NVFP4, WeightScheme

SCHEMES = {
    name: dataclasses.replace(scheme, activations="none", group_size=scheme.group_size and 16)
    for name, scheme in PRESETS.items()
}
# Largest relative error (root mean square) that each number of bits may cost normal weights.
BOUNDS = {4: 0.12, 8: 0.03}


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tensors_are_those_of_the_scheme_and_decode_close_to_the_weight(
    scheme: WeightScheme, dtype: torch.dtype
) -> None:
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(0)).to(dtype)
    tensors = encode(weight, scheme)
    names = {torch.bfloat16: "BF16", torch.float32: "F32"}
    expected = scheme.tensors(40, 96, names[dtype])
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {n: s.shape for n, s in expected.items()}
    assert {name: t.nbytes for name, t in tensors.items()} == {n: s.num_bytes for n, s in expected.items()}
    decoded = to_packed(tensors, scheme, (40, 96)).decode()
    error = (decoded - weight.float()).norm() / weight.float().norm()
    assert error < BOUNDS[scheme.num_bits]


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_decoded_weights_keep_their_codes(scheme: WeightScheme) -> None:
    # What has been rounded once lies on the grid of its scales, as long as those are the same.
    tensors = encode(torch.randn(24, 64, generator=torch.Generator().manual_seed(2)), scheme)
    packed = to_packed(tensors, scheme, (24, 64))
    again = to_packed(tensors, scheme, (24, 64)).decode()
    assert torch.equal(packed.decode(), again)
    assert packed.decode(torch.bfloat16).dtype == torch.bfloat16


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="groups of 16"):
        encode(torch.ones(4, 24), NVFP4)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "scheme", [s for s in SCHEMES.values() if s.strategy != "tensor"], ids=lambda s: s.name
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_gpu_makes_the_same_bytes(scheme: WeightScheme, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    weight = torch.randn(256, 1024, generator=generator) * torch.logspace(-12, 2, 256)[:, None]
    weight[7], weight[8, ::2], weight[9, 16:32] = 0.0, -0.0, 0.0
    weight = weight.to(dtype)
    here, there = encode(weight, scheme), encode(weight.cuda(), scheme)
    for part, tensor in here.items():
        found = there[part].cpu().contiguous()
        assert torch.equal(
            found.view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8)
        ), part
