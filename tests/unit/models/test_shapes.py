"""Published shapes, held against the publisher's figures and against what the networks are made of."""

import math

import pytest
import torch

from lean_laguna.core.drafter_config import DFlashConfig
from lean_laguna.core.drafter_writing import write_config
from lean_laguna.core.errors import ConfigError
from lean_laguna.core.model_config import LagunaConfig
from lean_laguna.models.dflash import DFlashDrafter
from lean_laguna.models.laguna import LagunaForCausalLM
from lean_laguna.models.shapes import SHAPES, drafter_shape, laguna_shape, repository_of


def _num_parameters(network):
    return sum(parameter.numel() for parameter in network.parameters())


@pytest.mark.parametrize(("name", "billions"), [("laguna-xs", 33.44), ("laguna-s-2.1", 117.6)])
def test_a_target_of_this_shape_has_the_published_number_of_parameters(name, billions):
    with torch.device("meta"):
        assert _num_parameters(LagunaForCausalLM(laguna_shape(name))) == pytest.approx(
            billions * 1e9, rel=2e-3
        )


def test_the_xs_drafter_is_the_published_file_of_0_9_gb():
    with torch.device("meta"):
        assert 2 * _num_parameters(DFlashDrafter(drafter_shape("laguna-xs"))) == pytest.approx(
            0.92e9, rel=5e-3
        )


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_survive_their_own_config_json_and_belong_together(name):
    target, drafter = laguna_shape(name), drafter_shape(name)
    assert LagunaConfig.from_dict(target.to_dict()) == target
    assert DFlashConfig.from_dict(write_config(drafter, "laguna")) == drafter
    drafter.check_target(target)
    assert max(drafter.target_layer_ids) == target.num_hidden_layers - 1
    assert repository_of(name).startswith("poolside/Laguna-")


def test_attention_factors_are_what_the_formula_gives():
    for name in ("laguna-xs-2.1", "laguna-s-2.1"):
        rope = laguna_shape(name).full_rope
        assert rope.attention_scaling == pytest.approx(0.1 * math.log(rope.factor) + 1, rel=1e-15)


def test_an_unknown_shape_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"did you mean 'laguna-xs-2\.1'"):
        laguna_shape("laguna-xs2.1")
