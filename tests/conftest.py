"""Fixtures that several packages' tests share."""

from __future__ import annotations

import gc
import os
import random
import shutil
import signal
import zlib

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

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

# The same examples in each run, however slow the machine, and a failure prints how to see it again.
# `--hypothesis-profile=fresh` draws others.
settings.register_profile(
    "fixed",
    derandomize=True,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("fresh", settings.get_profile("fixed"), derandomize=False)
settings.load_profile("fixed")

# One thread: the shapes here are too small to share, and two runs on two cores must not wait for each other.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let tests draw other numbers: ``--seed 1``."""
    parser.addoption("--seed", type=int, default=0, help="of the random numbers that tests draw (0)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what cannot run here, whichever tests were asked for."""
    if torch.cuda.is_available():
        impossible = {"interpreted"}
    else:
        impossible = {"gpu"} if shutil.which("g++") else {"gpu", "emulated"}
    left_out = [item for item in items if any(map(item.get_closest_marker, impossible))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]


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
def own_seed(request: pytest.FixtureRequest) -> int:
    """A seed of this test's own, the same in each run with the same ``--seed``, alone or beside others."""
    return zlib.crc32(f"{request.config.getoption('seed')} {request.node.nodeid}".encode())


@pytest.fixture(autouse=True)
def _seeded(own_seed: int) -> None:
    """What is drawn without a generator is the same in each run too."""
    random.seed(own_seed)
    np.random.seed(own_seed)
    torch.manual_seed(own_seed)


@pytest.fixture
def generator(own_seed: int) -> torch.Generator:
    """Fresh random numbers, the same in each run."""
    return torch.Generator().manual_seed(own_seed)
