import dataclasses

import pytest
import torch

from lean_laguna.core.errors import ConfigError
from lean_laguna.models.drafter_checkpoint import save_drafter
from lean_laguna.models.dspark import DSparkDrafter
from lean_laguna.train.drafter_start import build_drafter, check_start
from lean_laguna.train.recipe import LossTerms
from lean_laguna.train.target import build_target
from support.training import DRAFTER_MODEL, drafter_recipe, target_recipe

SPARK = DRAFTER_MODEL | {"architectures": ["LagunaDSparkModel"], "dspark_config": {"markov_rank": 4}}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target():
    return build_target(target_recipe(), CPU, "test")


@pytest.fixture
def dflash(target, tmp_path):
    drafter = build_drafter(drafter_recipe(seed=5), target, CPU, "test")
    save_drafter(drafter, tmp_path / "dflash")
    return drafter, tmp_path / "dflash"


def test_a_warm_start_takes_the_block_and_leaves_new_heads_without_effect(target, dflash):
    source, folder = dflash
    drafter = build_drafter(drafter_recipe(model=SPARK, warm_start=str(folder)), target, CPU, "test")
    assert isinstance(drafter, DSparkDrafter)
    for name, value in source.state_dict().items():
        assert torch.equal(drafter.state_dict()[name], value), name
    assert not drafter.markov_w2.any()
    assert all(parameter.requires_grad for parameter in drafter.parameters())


def test_a_dspark_warm_start_gives_its_heads_too(target, tmp_path):
    first = build_drafter(drafter_recipe(model=SPARK, seed=3), target, CPU, "test")
    torch.nn.init.normal_(first.markov_w2)
    save_drafter(first, tmp_path / "spark")
    again = build_drafter(
        drafter_recipe(model=SPARK, warm_start=str(tmp_path / "spark")), target, CPU, "test"
    )
    for (name, mine), other in zip(first.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(mine, other), name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 3, "layer_types": ["sliding_attention"] * 3}, "has nothing for layers.2"),
        ({"intermediate_size": 24}, r"has shape \[64, 16\] for layers.0.gate_up_proj.weight"),
        ({"sliding_window": 16}, r"was trained with 'layer_windows' \(8, 8\)"),
        (
            {"dflash_config": {**DRAFTER_MODEL["dflash_config"], "causal": False}},
            "trained with 'layer_causal'",
        ),
        ({"dflash_config": {**DRAFTER_MODEL["dflash_config"], "mask_token_id": 13}}, "'mask_token_id' 12"),
    ],
)
def test_a_warm_start_that_does_not_fit_is_refused(target, dflash, changes, message):
    recipe = drafter_recipe(model=SPARK | changes, warm_start=str(dflash[1]))
    (dflash[1] / "model.safetensors").unlink()  # the configs tell
    with pytest.raises(ConfigError, match=message):
        check_start(recipe, target.config, "test")


def test_a_confidence_term_needs_its_head(target):
    recipe = dataclasses.replace(drafter_recipe(), terms=LossTerms(confidence=1.0))
    with pytest.raises(ConfigError, match="the drafter has no confidence head"):
        build_drafter(recipe, target, CPU, "test")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"short_block": 1}, "'short_block' is 1, which leaves no draft; 2 is the least"),
        (
            {"num_eval_draft_tokens": 6},
            "'num_eval_draft_tokens' is 6, and this drafter makes 5 drafts at most",
        ),
    ],
)
def test_blocks_and_evaluation_that_do_not_fit_the_drafter_are_refused(target, changes, message):
    with pytest.raises(ConfigError, match=message):
        check_start(drafter_recipe(**changes), target.config, "test")
