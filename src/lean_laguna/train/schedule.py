"""How far a run is, and the learning rate that belongs there. Budgets are seconds or steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lean_laguna.core.errors import ConfigError
from lean_laguna.train.recipe import OptimizerRecipe


@dataclass(frozen=True)
class Budget:
    """When a run ends: after so many seconds of training, or after so many steps.

    Attributes:
        seconds: Wall-clock limit, or None.
        steps: Step limit, or None; exactly one of the two is given.
    """

    seconds: float | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        if (self.seconds is None) == (self.steps is None):
            raise ConfigError("a training budget is either seconds or steps, not both and not neither")

    def progress(self, step: int, elapsed_s: float) -> float:
        """Return the share of the budget that is used, 0 to 1.

        A step budget ignores the clock, so the same recipe gives the same weights.
        """
        used = (
            step / max(1, self.steps)
            if self.steps is not None
            else elapsed_s / max(1e-9, self.seconds or 0.0)
        )
        return min(1.0, used)


def learning_rate(recipe: OptimizerRecipe, progress: float) -> float:
    """Return the rate at ``progress`` in 0..1: warm-up, then constant and linear decay (wsd), or cosine."""
    if progress < recipe.warmup:
        return recipe.lr * max(progress / recipe.warmup, 0.01)
    if recipe.shape == "cosine":
        through = (progress - recipe.warmup) / max(1e-9, 1.0 - recipe.warmup)
        factor = 0.5 * (1.0 + math.cos(math.pi * min(1.0, through)))
    elif recipe.shape == "wsd":
        factor = min(1.0, (1.0 - progress) / recipe.decay) if recipe.decay > 0 else 1.0
    else:
        raise ConfigError(f"optimizer: 'shape' is '{recipe.shape}'; accepted: wsd, cosine")
    return recipe.lr * (recipe.final_lr + (1.0 - recipe.final_lr) * factor)
