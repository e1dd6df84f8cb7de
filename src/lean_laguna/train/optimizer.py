"""The optimisers of training: AdamW, or Muon on matrices beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from lean_laguna.core.errors import ConfigError
from lean_laguna.train.recipe import OptimizerRecipe


class Optimizers:
    """Several optimisers of disjoint parameters that act as one."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self._parts = parts

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """All groups."""
        return [group for part in self._parts for group in part.param_groups]

    def step(self) -> None:
        """Step all."""
        for part in self._parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients."""
        for part in self._parts:
            part.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the states in order."""
        return {"parts": [part.state_dict() for part in self._parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what ``state_dict`` gave."""
        for part, held in zip(self._parts, state["parts"], strict=True):
            part.load_state_dict(held)


AnyOptimizer = torch.optim.Optimizer | Optimizers


def make_optimizer(module: nn.Module, recipe: OptimizerRecipe) -> torch.optim.Optimizer | Optimizers:
    """Return AdamW with weight decay on matrices and expert banks only, fused on a GPU; or Muon on matrices.

    Muon's evidence: speculators trains its drafters so since RFC 979 (learning rate ten times AdamW's,
    updates scaled to AdamW's size, tables and vectors left to AdamW); on laguna-nano it was not compared.

    Raises:
        ConfigError: Another kind.
    """
    if recipe.kind not in ("adamw", "muon"):
        raise ConfigError(f"optimizer: 'kind' is '{recipe.kind}'; accepted: adamw, muon")
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    heads: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            kept = ("norm", "embed")  # norms, and tables that are looked up
            is_matrix = parameter.ndim >= 2 and not any(word in name for word in kept)
            is_head = name.startswith(("markov", "confidence"))
            (heads if is_head else decayed if is_matrix else plain).append(parameter)
    undecayed: list[dict[str, Any]] = [
        {"params": plain, "weight_decay": 0.0},
        {"params": heads, "weight_decay": 0.0, "lr_scale": recipe.heads_scale},
    ]
    undecayed = [group for group in undecayed if group["params"]]
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, *undecayed]
    on_gpu = any(p.is_cuda for p in module.parameters())
    betas = (recipe.betas[0], recipe.betas[1])
    if recipe.kind == "adamw":
        return torch.optim.AdamW(groups, lr=recipe.lr, betas=betas, eps=1e-10, fused=on_gpu)
    flat = [p for p in decayed if p.ndim == 2]
    rest = [{"params": [p for p in decayed if p.ndim != 2], "weight_decay": 0.0}, *undecayed]
    rest = [group for group in rest if group["params"]]
    muon = torch.optim.Muon(
        flat, lr=recipe.lr, weight_decay=recipe.weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    for group in muon.param_groups:
        group["lr_scale"] = recipe.muon_scale
    return Optimizers(muon, torch.optim.AdamW(rest, lr=recipe.lr, betas=betas, eps=1e-10, fused=on_gpu))
