"""From a configuration to an engine: names to folders, folders to models, device and number format."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from lean_laguna.core.config import EngineConfig
from lean_laguna.core.errors import ConfigError
from lean_laguna.engine.llm_engine import LLMEngine
from lean_laguna.models.catalog import resolve_model
from lean_laguna.models.checkpoint import load_laguna
from lean_laguna.models.drafter_checkpoint import load_drafter
from lean_laguna.models.tokenizer import Tokenizer
from lean_laguna.spec.proposer import DFlashProposer

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve_device(name: str) -> torch.device:
    """Return the device that ``auto``, ``cpu`` or ``cuda`` stands for on this machine.

    Raises:
        ConfigError: ``cuda`` where there is none.
    """
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ConfigError(
            "device 'cuda' was asked for, but torch sees no CUDA device here; use 'cpu' or 'auto'"
        )
    return torch.device("cuda" if has_gpu and name != "cpu" else "cpu")


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the number format that ``auto``, ``float32`` or ``bfloat16`` stands for on a device."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return _DTYPES[name]


def say_what_holds_on(device: torch.device) -> None:
    """Say on stderr, where it is so, that speculation is exact up to near-ties only.

    On a GPU the library picks its kernel by the number of rows, so a verified row may differ from a decoded
    one in the last bit; the tiles that rule this out are the CPU's.
    """
    if device.type != "cpu":
        print(
            "lean-laguna: on a GPU this version runs plain PyTorch, where a near-tie may fall the other way "
            "with a drafter; outputs equal to the bit are guaranteed on a CPU (device 'cpu')",
            file=sys.stderr,
        )


def load_engine(config: EngineConfig) -> tuple[LLMEngine, Path]:
    """Load everything that a configuration names.

    Args:
        config: The configuration.

    Returns:
        The engine and the target's folder.

    Raises:
        ConfigError: A value does not fit the checkpoint or this machine.
        CheckpointError: A checkpoint is missing or damaged.
    """
    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    folder = resolve_model(config.model)
    # Found before any weight is read: a wrong name should not cost the target's loading time.
    drafter_folder = resolve_model(config.speculative.model) if config.speculative else None
    tokenizer = Tokenizer.from_dir(folder)
    target = load_laguna(folder, dtype=dtype, device=device, attention_factor=config.attention_factor)
    proposer = None
    if drafter_folder is not None:
        drafter = load_drafter(drafter_folder, target.config, dtype=dtype, device=device)
        proposer = DFlashProposer(drafter, target)
        say_what_holds_on(device)
    return LLMEngine(target, tokenizer, proposer, config), folder
