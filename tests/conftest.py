"""Fixtures that several packages' tests share."""

from __future__ import annotations

import gc
import os
import signal

import pytest
import torch

# Before anything imports Triton, which reads it once: without a GPU its kernels run in its interpreter.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

from tests.support.interpreter import make_interpreter_quicker
from tests.support.targets import laguna_json, random_target

from lean_laguna.core.model_config import LagunaConfig
from lean_laguna.models.laguna import LagunaForCausalLM

# What is started in the background of a script ignores Ctrl-C, and so do its children, which tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# One thread: the shapes here are too small to share, and two runs on two cores must not wait for each other.
torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked ``gpu`` where there is none, whichever tests were asked for."""
    if torch.cuda.is_available():
        return
    left_out = [item for item in items if item.get_closest_marker("gpu")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def pytest_collection_finish() -> None:
    """Once the tests have imported what they need, none of which is garbage."""
    make_interpreter_quicker()
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Let go of what is garbage at the end."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def tiny_config() -> LagunaConfig:
    """Every feature: F S S F, window 8, 4 and 6 heads, 8 experts top-2 plus shared, YaRN."""
    return LagunaConfig.from_dict(laguna_json(), "tiny")


@pytest.fixture(scope="session")
def tiny_target(tiny_config: LagunaConfig) -> LagunaForCausalLM:
    """A random target of ``tiny_config`` in float32; tests must not change it."""
    return random_target(tiny_config)


@pytest.fixture
def generator() -> torch.Generator:
    """Fresh random numbers, the same in each run."""
    return torch.Generator().manual_seed(0)
