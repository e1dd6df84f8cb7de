import pytest

from lean_laguna.core.errors import ConfigError
from lean_laguna.train.recipe import OptimizerRecipe
from lean_laguna.train.schedule import Budget, learning_rate


def test_a_budget_is_seconds_or_steps():
    assert Budget(steps=10).progress(5, 1e9) == 0.5
    assert Budget(seconds=10.0).progress(10**9, 2.0) == 0.2
    assert Budget(seconds=10.0).progress(0, 20.0) == 1.0
    for wrong in ({}, {"seconds": 1.0, "steps": 1}):
        with pytest.raises(ConfigError):
            Budget(**wrong)


def test_wsd_warms_up_stays_and_falls_to_zero():
    recipe = OptimizerRecipe(lr=1.0, warmup=0.1, decay=0.4)
    rates = [learning_rate(recipe, p) for p in (0.0, 0.05, 0.1, 0.6, 0.8, 1.0)]
    assert rates == pytest.approx([0.01, 0.5, 1.0, 1.0, 0.5, 0.0])


def test_cosine_falls_from_the_end_of_the_warm_up():
    recipe = OptimizerRecipe(lr=1.0, warmup=0.2, shape="cosine", final_lr=0.1)
    assert learning_rate(recipe, 0.2) == pytest.approx(1.0)
    assert learning_rate(recipe, 0.6) == pytest.approx(0.55)
    assert learning_rate(recipe, 1.0) == pytest.approx(0.1)


def test_an_unknown_shape_is_an_error():
    with pytest.raises(ConfigError, match="wsd, cosine"):
        learning_rate(OptimizerRecipe(shape="linear"), 0.5)
