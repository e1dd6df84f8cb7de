import numpy as np
import pytest
import torch

from lean_laguna.core.rope_config import RopeConfig
from lean_laguna.models.rope import RotaryEmbedding, inverse_frequencies

# Frequencies of R = 64 rotating dimensions, theta 500000, computed in float64: factor, original context,
# beta_fast, then inverse frequencies 8, 12, 16 and 31.
TABLE = {
    "XS.2, 32": (32, 4096, 64, 0.0276703466, 0.00279690267, 4.41941738e-05, 9.41830673e-08),
    "XS.2, 64": (64, 4096, 64, 0.0275100936, 0.00272439038, 2.20970869e-05, 4.70915336e-08),
    "XS-2.1": (32, 8192, 64, 0.0342941362, 0.00408140612, 0.000293288608, 9.41830673e-08),
    "S-2.1, 256K": (32, 8192, 32, 0.0376060309, 0.00493774175, 0.000348642927, 9.41830673e-08),
    "S-2.1, 1M": (128, 8192, 32, 0.0376060309, 0.00488076781, 0.000322862992, 2.35457668e-08),
}


def yarn(factor, original, beta_fast, **changes):
    return RopeConfig(
        rope_theta=500000.0, partial_rotary_factor=0.5, rope_type="yarn", factor=float(factor),
        original_max_position_embeddings=original, beta_fast=float(beta_fast), **changes,
    )  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_yarn_frequencies_are_the_published_ones(name):
    factor, original, beta_fast, *expected = TABLE[name]
    found = inverse_frequencies(yarn(factor, original, beta_fast), 128)[[8, 12, 16, 31]]
    # Nine digits of the table, float32 here.
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)


def test_default_frequencies_fall_from_one():
    found = inverse_frequencies(RopeConfig(rope_theta=10000.0), 8)
    np.testing.assert_allclose(found.numpy(), 10000.0 ** -np.array([0, 0.25, 0.5, 0.75]), rtol=1e-6)


def test_a_ramp_of_no_width_is_not_divided_by_zero():
    rope = yarn(4, 64, 32, truncate=False)
    assert torch.isfinite(inverse_frequencies(rope, 8)).all()
    narrow = RopeConfig(2.0, 1.0, "yarn", 4.0, 4, 1e9, 1e9)
    assert torch.isfinite(inverse_frequencies(narrow, 8)).all()


def test_the_scale_multiplies_cos_and_sin():
    plain, scaled = (
        RotaryEmbedding(yarn(32, 64, 32, attention_factor=scale), 16, 256) for scale in (1.0, 1.5)
    )
    positions = torch.tensor([0, 3, 200])
    for ours, theirs in zip(scaled(positions), plain(positions), strict=True):
        torch.testing.assert_close(ours, 1.5 * theirs)


def test_a_position_has_the_same_bits_however_far_the_table_has_grown():
    rope = yarn(32, 64, 32)
    at_once, grown = RotaryEmbedding(rope, 16, 10_000), RotaryEmbedding(rope, 16, 10_000)
    with torch.no_grad():
        for last in (3, 900, 1030, 5000, 9000):
            grown(torch.tensor([last]))
        positions = torch.randperm(9000)
        for one, other in zip(at_once(positions), grown(positions), strict=True):
            assert torch.equal(one, other)


def test_the_table_agrees_with_the_direct_computation():
    rotary = RotaryEmbedding(yarn(32, 64, 32), 16, 4096)
    positions = torch.arange(2500)
    with torch.no_grad():
        table = rotary(positions)
    direct = rotary(positions)
    for one, other in zip(table, direct, strict=True):
        assert one.shape == (2500, 8)
        # Vector and scalar code of the same function.
        torch.testing.assert_close(one, other, rtol=0, atol=3e-7)


def test_positions_keep_their_shape():
    rotary = RotaryEmbedding(RopeConfig(10000.0), 8, 64)
    cos, sin = rotary(torch.arange(6).view(2, 3))
    assert cos.shape == sin.shape == (2, 3, 8)


def test_no_positions_need_no_table():
    with torch.no_grad():
        cos, _ = RotaryEmbedding(RopeConfig(10000.0), 8, 64)(torch.arange(0))
    assert cos.shape == (0, 8)
