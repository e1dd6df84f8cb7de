"""From a configuration to an engine: names to folders, folders to models, device and number format."""

from __future__ import annotations

import sys
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from threading import Thread

import torch

from lean_laguna.core.config import EngineConfig
from lean_laguna.core.drafter_config import DFlashConfig
from lean_laguna.core.errors import ConfigError
from lean_laguna.core.model_config import LagunaConfig
from lean_laguna.core.provenance import checkpoint_hash
from lean_laguna.engine.gpu_weights import why_not
from lean_laguna.engine.kv_budget import MEMINFO, free_memory_bytes
from lean_laguna.engine.llm_engine import LLMEngine
from lean_laguna.engine.model_runner import Target
from lean_laguna.models.catalog import resolve_model
from lean_laguna.models.checkpoint import check_laguna, load_laguna, load_target_config
from lean_laguna.models.dflash import DFlashDrafter
from lean_laguna.models.drafter_checkpoint import (
    check_drafter,
    is_quantised,
    load_drafter,
    recorded_target,
)
from lean_laguna.models.drafter_quantising import quantise_drafter
from lean_laguna.models.dummy import (
    drafter_config,
    dummy_drafter,
    dummy_target,
    dummy_tokenizer,
    target_config,
)
from lean_laguna.models.laguna import LagunaForCausalLM
from lean_laguna.models.packed_parameters import unpack_parameters
from lean_laguna.models.tokenizer import Tokenizer
from lean_laguna.models.unset import on_meta
from lean_laguna.spec.dspark_proposer import make_proposer
from lean_laguna.spec.proposer import DFlashProposer

_PATIENCE_S = 1.0  # for a hash that takes longer than loading
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


def engine_type(
    target: Target, proposer: DFlashProposer | None, kernels: str, device: torch.device
) -> type[LLMEngine]:
    """Return the engine for these models: on the Triton kernels, or on plain PyTorch.

    Says on stderr where a GPU runs without the kernels: slowly, and with a drafter exact up to near-ties
    only, for the library picks its own kernels by the number of rows. On a CPU, and with the kernels, outputs
    are exact to the bit.

    Args:
        target: The model served.
        proposer: The drafter, or None.
        kernels: ``auto``, ``torch``, ``triton`` or ``cuda``.
        device: Where they run.

    Raises:
        ConfigError: ``triton`` or ``cuda`` was asked for and cannot run these models here.
    """
    reason = "kernels 'torch' was asked for"
    is_asked_for = kernels in ("triton", "cuda")
    if wants_kernels(kernels, device):
        found = why_not(target, proposer.drafter if proposer is not None else None, device)
        if found is None:
            from lean_laguna.engine.gpu_engine import GpuEngine

            return GpuEngine
        if is_asked_for:
            raise ConfigError(f"kernels '{kernels}' cannot run here: {found}; use 'auto' or 'torch'")
        reason = found
    if isinstance(target, LagunaForCausalLM) and target.packed_weights:
        print(
            f"lean-laguna: plain PyTorch ({reason}): quantised weights are decoded in memory", file=sys.stderr
        )
        unpack_parameters(target)
    if device.type != "cpu":
        caution = (
            ", and a near-tie may fall the other way with a drafter; outputs equal to the bit need the "
            "Triton kernels, or a CPU"
        )
        told = f"plain PyTorch on the GPU ({reason}): slow{caution if proposer is not None else ''}"
        print(f"lean-laguna: {told}", file=sys.stderr)
    return LLMEngine


def wants_kernels(kernels: str, device: torch.device) -> bool:
    """Say whether these models are meant for the GPU kernels, which take weights packed."""
    return kernels in ("triton", "cuda") or (kernels == "auto" and device.type == "cuda")


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
    if config.is_synthetic:
        print(f"lean-laguna: SYNTHETIC: {synthetic_note(config)}", file=sys.stderr)
    if config.load_format == "dummy":
        return _load_dummy(config, device, dtype), Path()
    folder, drafter_folder, config_of_target = _found(config)
    tokenizer = Tokenizer.from_dir(folder)
    check_room(config_of_target, dtype, device, config.kernels)
    trained_for = recorded_target(drafter_folder) if drafter_folder is not None else None
    served = _hash_meanwhile(folder) if trained_for is not None else None
    if is_quantised(folder) and not wants_kernels(config.kernels, device):
        _say_decoded(folder, "target", dtype)
    target = load_laguna(
        folder,
        dtype=dtype,
        device=device,
        attention_factor=config.attention_factor,
        keep_packed=wants_kernels(config.kernels, device),
    )
    proposer = None
    if drafter_folder is not None:
        drafter = load_drafter(drafter_folder, target.config, dtype=dtype, device=device)
        if is_quantised(drafter_folder) and config.speculative and config.speculative.quantization is None:
            _say_decoded(drafter_folder, "drafter", dtype)
        _prepare_drafter(drafter, config)
        proposer = make_proposer(drafter, target)
    if served is not None and drafter_folder is not None and trained_for is not None:
        wait([served], _PATIENCE_S)
        served.add_done_callback(partial(_compare, drafter_folder, folder, trained_for))
    make = engine_type(target, proposer, config.kernels, device)
    return make(target, tokenizer, proposer, config), folder


def check_checkpoints(config: EngineConfig) -> None:
    """Find out what can be known of a configuration's checkpoints without reading a weight.

    Raises:
        ConfigError: A value does not fit the checkpoint.
        CheckpointError: A checkpoint is missing, or its files are not what its config says.
    """
    folder, drafter_folder, _ = _found(config)
    check_laguna(folder)
    if drafter_folder is not None:
        check_drafter(drafter_folder)


def _found(config: EngineConfig) -> tuple[Path, Path | None, LagunaConfig]:
    """Return the folders of target and drafter, which belong together, and the target's config.

    A wrong name or a wrong pair should not cost the target's loading time.
    """
    folder = resolve_model(config.model)
    drafter_folder = resolve_model(config.speculative.model) if config.speculative else None
    target = load_target_config(folder, attention_factor=config.attention_factor)
    if drafter_folder is not None:
        DFlashConfig.from_file(drafter_folder).check_target(target, str(drafter_folder))
    return folder, drafter_folder, target


def give_back_memory() -> None:
    """Let a GPU have back what was freed of it and is kept for later."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _hash_meanwhile(folder: Path) -> Future[str]:
    """Start hashing a checkpoint: a large one may take longer than it takes to load, and nobody waits."""
    hashed: Future[str] = Future()

    def work() -> None:
        try:
            hashed.set_result(checkpoint_hash(folder))
        except BaseException as error:
            hashed.set_exception(error)

    Thread(target=work, name="hash", daemon=True).start()
    return hashed


def _compare(drafter_folder: Path, folder: Path, trained_for: str, hashed: Future[str]) -> None:
    """Say in one line where a drafter was trained for another target than the one it is used with."""
    if hashed.exception() is not None or hashed.result() == trained_for:
        return
    print(
        f"lean-laguna: {drafter_folder}: was trained for another target than {folder} (its config records "
        f"target_sha256 {trained_for:.12}, this one's is {hashed.result():.12}): fewer of its drafts may be "
        "accepted; the output is right",
        file=sys.stderr,
    )


def _say_decoded(folder: Path, what: str, dtype: torch.dtype) -> None:
    """Say in one line that a quantised model is not quantised in memory: nobody would see why it is slow."""
    print(
        f"lean-laguna: {folder}: a quantised {what}, decoded at load to "
        f"{str(dtype).removeprefix('torch.')}: no smaller and no faster than one that is not",
        file=sys.stderr,
    )


def check_room(target: LagunaConfig, dtype: torch.dtype, device: torch.device, kernels: str) -> None:
    """Refuse weights that the machine's memory cannot hold; the system would kill one program or another.

    Args:
        target: Of the model about to be loaded.
        dtype: Of its weights in memory.
        device: Where they go; only a CPU is looked at, for a GPU refuses by itself.
        kernels: As in the configuration; GPU kernels keep quantised weights packed, and they may be small.

    Raises:
        ConfigError: Says what they take and what is free.
    """
    if device.type != "cpu" or wants_kernels(kernels, device) or not MEMINFO.is_file():
        return
    num_weights = sum(weight.numel() for weight in on_meta(lambda: LagunaForCausalLM(target)).parameters())
    needed, free = num_weights * dtype.itemsize, free_memory_bytes(device)
    if needed <= free:
        return
    halved = "; --dtype bfloat16 takes half" if dtype == torch.float32 and needed <= 2 * free else ""
    raise ConfigError(
        f"the weights take {needed / 1e9:.1f} GB as {str(dtype).removeprefix('torch.')}, and "
        f"{free / 1e9:.1f} GB of memory are free{halved}; 'lean-laguna plan' says what fits where"
    )


def _prepare_drafter(drafter: DFlashDrafter, config: EngineConfig) -> None:
    """Check that a drafter is of the kind asked for, and quantise it if that was asked for."""
    asked = config.speculative
    assert asked is not None
    kind = "dspark" if drafter.config.dspark is not None else "dflash"
    if asked.method not in (None, kind):
        raise ConfigError(
            f"speculative config: 'method' is '{asked.method}', but '{asked.model}' is a {kind} drafter; "
            "leave it out, or name the drafter's own"
        )
    if asked.quantization is not None:
        quantise_drafter(drafter)


def synthetic_note(config: EngineConfig) -> str:
    """Say in one line why what an engine says is not a model's output."""
    reasons = []
    if config.load_format == "dummy":
        reasons.append(f"random weights in the shape of {config.shape or config.model}")
    if config.speculative is not None and config.speculative.is_synthetic:
        reasons.append("drafts accepted at given rates")
    return f"{' and '.join(reasons)}; for timing only, the output is not a model's"


def _load_dummy(config: EngineConfig, device: torch.device, dtype: torch.dtype) -> LLMEngine:
    """Return an engine over random weights."""
    shape = config.shape or config.model
    target_shape = target_config(shape)
    drafter_shape = drafter_config(config.speculative.model, shape) if config.speculative else None
    if drafter_shape is not None:
        drafter_shape.check_target(target_shape, shape)
    scheme = config.scheme or "bf16"
    if scheme != "bf16" and not wants_kernels(config.kernels, device):
        raise ConfigError(
            f"scheme '{scheme}' at random needs the GPU kernels, which take weights packed: --kernels triton"
        )
    check_room(target_shape, dtype, device, config.kernels)
    target = dummy_target(target_shape, dtype, device, scheme=scheme)
    proposer = None
    if drafter_shape is not None:
        drafter = dummy_drafter(drafter_shape, dtype, device)
        _prepare_drafter(drafter, config)
        proposer = make_proposer(drafter, target)
    make = engine_type(target, proposer, config.kernels, device)
    return make(target, dummy_tokenizer(target_shape.vocab_size), proposer, config)
