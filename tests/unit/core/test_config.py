"""Synthetic acceptance, kernels and dummy weights are spelled as in vLLM, and mistakes are named."""

import pytest

from lean_laguna.core.config import EngineConfig, SpeculativeConfig
from lean_laguna.core.errors import ConfigError

SYNTHETIC = {"model": "m", "rejection_sample_method": "synthetic"}


def test_synthetic_rates_are_read_as_vllm_writes_them():
    config = SpeculativeConfig.parse(
        {**SYNTHETIC, "num_speculative_tokens": 2, "synthetic_acceptance_rates": [0.9, 0.5]}
    )
    assert config.synthetic_rates(7) == ((0.9, 0.5),)
    several = {**SYNTHETIC, "synthetic_acceptance_rates": [[0.9, 0.5], [0.2, 0.1]]}
    assert SpeculativeConfig.parse(several).synthetic_rates(7) == ((0.9, 0.5), (0.2, 0.1))
    assert EngineConfig(speculative=config).is_synthetic
    assert not EngineConfig(speculative=SpeculativeConfig("m")).is_synthetic


def test_a_mean_length_stands_for_whole_positions_and_a_part_of_one():
    config = SpeculativeConfig.parse({**SYNTHETIC, "synthetic_acceptance_length": 2.6})
    assert config.synthetic_rates(3) == (pytest.approx((1.0, 0.6, 0.0)),)
    assert SpeculativeConfig("m").synthetic_rates(3) is None


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"synthetic_acceptance_rates": [0.5]}, "none without it"),
        ({"rejection_sample_method": "synthetic"}, "synthetic_acceptance_rates"),
        ({"rejection_sample_method": "block"}, "'standard' or 'synthetic'"),
        ({"method": "eagle3"}, "'dflash' or 'dspark', found 'eagle3'"),
        ({"quantization": "int4"}, "'fp8' or left out, found 'int4'"),
        ({**SYNTHETIC, "synthetic_acceptance_rates": [0.5, 0.6]}, "do not increase"),
        ({**SYNTHETIC, "synthetic_acceptance_rates": [1.5]}, "0 to 1"),
        ({**SYNTHETIC, "synthetic_acceptance_rates": [[0.5], [0.5, 0.6]]}, "do not increase"),
        ({**SYNTHETIC, "synthetic_acceptance_rates": []}, "0 to 1"),
        ({**SYNTHETIC, "synthetic_acceptance_length": 0.5}, "from 1"),
        (
            {**SYNTHETIC, "synthetic_acceptance_rates": [0.5], "num_speculative_tokens": 3},
            "a rate for each of the 3",
        ),
    ],
)
def test_mistakes_in_synthetic_acceptance_are_named(given, named):
    with pytest.raises(ConfigError, match=named):
        SpeculativeConfig.parse({"model": "m", **given})


def test_a_shape_goes_with_dummy_weights_only():
    assert EngineConfig(load_format="dummy", shape="laguna-xs").is_synthetic
    with pytest.raises(ConfigError, match="load_format 'dummy'"):
        EngineConfig(shape="laguna-xs")
    with pytest.raises(ConfigError, match="kv_cache_dtype must be one of auto, fp8, found 'int8'"):
        EngineConfig(kv_cache_dtype="int8")
    with pytest.raises(ConfigError, match="kernels must be one of"):
        EngineConfig(kernels="metal")
