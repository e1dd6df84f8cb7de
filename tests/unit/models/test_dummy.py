"""Random weights by shape name: reproducible, close to uniform routing, and nobody's text."""

import pytest
import torch

from lean_laguna.core.errors import LeanLagunaError
from lean_laguna.models.dummy import (
    STD,
    drafter_config,
    dummy_drafter,
    dummy_target,
    dummy_tokenizer,
    target_config,
)

CPU = torch.device("cpu")


def test_the_same_seed_gives_the_same_weights():
    config = target_config("nano")
    first, second = (dummy_target(config, torch.float32, CPU, seed=3) for _ in range(2))
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    sparse = first.layers[1].mlp
    assert not sparse.gate.e_score_correction_bias.any()
    assert bool((first.model.norm.weight == 1).all())
    other = dummy_target(config, torch.float32, CPU, seed=4)
    assert not torch.equal(other.lm_head.weight, first.lm_head.weight)


def test_a_drafter_is_named_dummy_or_by_its_checkpoint():
    assert drafter_config("dummy", "laguna-xs").target_layer_ids == (1, 13, 25, 33, 39)
    drafter = dummy_drafter(drafter_config("nano-dflash", "nano"), torch.float32, CPU)
    assert torch.isfinite(drafter.fc.weight).all()


def test_an_unknown_shape_is_refused():
    with pytest.raises(LeanLagunaError, match="laguna-xz"):
        target_config("laguna-xz")


@pytest.mark.parametrize("scheme", ["nvfp4-all", "fp8", "fp8-all"])
def test_quantised_weights_are_drawn_packed(scheme):
    config = target_config("nano")
    target = dummy_target(config, torch.float32, CPU, scheme=scheme)
    held = {name for name, parameter in target.named_parameters() if parameter.is_meta}
    assert held == set(target.packed_weights)
    assert ("lm_head.weight" in held) == scheme.endswith("-all")
    bank = target.packed_weights["model.layers.1.mlp.experts.gate_up_proj"].decode()
    assert bank.shape == (config.num_experts, 2 * config.moe_intermediate_size, config.hidden_size)
    assert bank.std().item() == pytest.approx(STD, rel=0.1)
    again = dummy_target(config, torch.float32, CPU, scheme=scheme)
    for name, weight in target.packed_weights.items():
        assert torch.equal(weight.codes.view(torch.uint8), again.packed_weights[name].codes.view(torch.uint8))


def test_an_unknown_scheme_is_refused():
    with pytest.raises(LeanLagunaError, match="unknown scheme 'nvfp5'"):
        dummy_target(target_config("nano"), torch.float32, CPU, scheme="nvfp5")


def test_text_is_numbers():
    tokenizer = dummy_tokenizer(300)
    assert tokenizer.decode([5, 7, 299]) == "<5><7><299>"
    assert tokenizer.encode("<7> <5>") == [7, 5]
    assert tokenizer.eos_token_ids == ()
