"""Networks without memory for their weights."""

from __future__ import annotations

import subprocess
import sys

import torch
from torch import nn

from lean_laguna.models.laguna import LagunaForCausalLM
from lean_laguna.models.unset import on_meta
from support.engines import tiny_config


def test_it_is_the_network_without_its_weights() -> None:
    config = tiny_config()
    found, expected = on_meta(lambda: LagunaForCausalLM(config)), LagunaForCausalLM(config)
    shapes = {name: parameter.shape for name, parameter in expected.named_parameters()}
    assert {name: parameter.shape for name, parameter in found.named_parameters()} == shapes
    assert all(parameter.is_meta and not parameter.requires_grad for parameter in found.parameters())
    assert not any(module.training for module in found.modules())


def test_networks_built_later_are_initialised_again() -> None:
    on_meta(lambda: nn.Linear(2, 2))
    torch.manual_seed(0)
    first = nn.Linear(64, 64)
    assert not first.weight.is_meta
    assert 0.01 < first.weight.std().item() < 0.2


def test_torchs_compiler_is_not_loaded_for_it() -> None:
    code = (
        "import sys\n"
        "from torch import nn\n"
        "from lean_laguna.models.unset import on_meta\n"
        "on_meta(lambda: nn.Embedding(4, 4))\n"
        "sys.exit('torch._dynamo' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
