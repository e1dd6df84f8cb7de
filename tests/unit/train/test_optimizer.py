import dataclasses

import pytest
import torch

from lean_laguna.train.drafter_start import build_drafter
from lean_laguna.train.optimizer import make_optimizer
from lean_laguna.train.recipe import OptimizerRecipe
from lean_laguna.train.target import build_target
from support.training import DRAFTER_MODEL, drafter_recipe, target_recipe

SPARK = DRAFTER_MODEL | {"architectures": ["LagunaDSparkModel"], "dspark_config": {"markov_rank": 4}}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def drafter():
    target = build_target(target_recipe(), CPU, "test")
    return build_drafter(drafter_recipe(model=SPARK), target, CPU, "test")


def settings(drafter, optimizer):
    """Return decay and scale of the learning rate by parameter name."""
    names = {id(parameter): name for name, parameter in drafter.named_parameters()}
    return {
        names[id(parameter)]: (group["weight_decay"], group.get("lr_scale", 1.0))
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_every_parameter_is_trained_once_and_heads_at_their_own_rate(drafter, kind):
    recipe = OptimizerRecipe(kind=kind, weight_decay=0.1, heads_scale=8.0, muon_scale=10.0)
    found = settings(drafter, make_optimizer(drafter, recipe))
    assert found.keys() == dict(drafter.named_parameters()).keys()
    for name, (decay, scale) in found.items():
        is_head = name.startswith(("markov", "confidence"))
        is_matrix = name.endswith("weight") and not is_head
        assert decay == (0.1 if is_matrix else 0.0), name
        assert scale == (8.0 if is_head else 10.0 if is_matrix and kind == "muon" else 1.0), name


def test_a_drafter_without_heads_has_no_group_for_them():
    target = build_target(target_recipe(), CPU, "test")
    drafter = build_drafter(drafter_recipe(), target, CPU, "test")
    optimizer = make_optimizer(drafter, dataclasses.replace(OptimizerRecipe(), heads_scale=8.0))
    assert [group.get("lr_scale", 1.0) for group in optimizer.param_groups] == [1.0, 1.0]
