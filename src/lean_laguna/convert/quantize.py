"""Quantises a checkpoint without data, file by file, in little memory; what was done survives a kill.

The result is built in a hidden folder beside its place and moved there whole. An error removes that folder; a
kill or Ctrl-C leaves its finished files, from which the same command goes on.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lean_laguna.convert.conversion_state import STATE_FILE, ConversionState, size_of
from lean_laguna.convert.part_converter import Conversion
from lean_laguna.convert.quantize_config import quantization_json
from lean_laguna.convert.shard_conversion import Progress, ShardConversion
from lean_laguna.convert.shard_layout import shard_layout
from lean_laguna.convert.source import Source
from lean_laguna.convert.weight_encoder import WeightError
from lean_laguna.convert.worker_pool import worker_pool
from lean_laguna.core.cpus import usable_cpus
from lean_laguna.core.errors import ConfigError, WorkerError
from lean_laguna.core.files import atomic_write_json, sole_writer
from lean_laguna.engine.kv_budget import free_memory_bytes
from lean_laguna.quant.scheme import TensorSpec, WeightScheme

_INDEX = "model.safetensors.index.json"
# Left over on the disk beside the result: other files, the file system's own.
_SPARE_BYTES = 64 << 20
_MOST_WORKERS, _WORKER_BYTES, _WORKER_MEMORY_BYTES = 16, 256 << 20, 512 << 20


@dataclass(frozen=True)
class QuantizeResult:
    """What a conversion did.

    Attributes:
        num_modules: Linears quantised.
        source_bytes: Of all tensors before.
        written_bytes: Of all files with tensors after.
        num_resumed_files: Files that an earlier run had finished.
        errors: Per linear, where asked for.
        num_workers: Workers, this process included.
        workers_cpu_s: Time that other processes have taken for it.
        workers_peak_rss_bytes: Memory that they have taken.
    """

    num_modules: int
    source_bytes: int
    written_bytes: int
    num_resumed_files: int
    errors: Mapping[str, WeightError]
    num_workers: int
    workers_cpu_s: float
    workers_peak_rss_bytes: int


def default_workers(source: Source) -> int:
    """Return how many workers a conversion on a CPU should have: one per usable CPU.

    Few for a small checkpoint, since a process takes a second to start, and no more than memory and disks
    bear: each takes about 0.3 GB.
    """
    num_bytes = sum(source.tensors.bytes_of(name)[2] for name in source.tensors.names())
    free = free_memory_bytes(torch.device("cpu"))
    by_memory, by_work = free // _WORKER_MEMORY_BYTES, num_bytes // _WORKER_BYTES
    return max(1, min(usable_cpus(), _MOST_WORKERS, by_memory, by_work))


def quantize(
    source: Source,
    destination: str | Path,
    schemes: Mapping[str, WeightScheme],
    *,
    num_workers: int = 1,
    is_checked: bool = False,
    shares_divisors: bool = True,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> QuantizeResult:
    """Quantise linears of a checkpoint into a new folder; all else is copied byte for byte.

    Args:
        source: The checkpoint.
        destination: A folder that does not exist yet, or an empty one.
        schemes: Of the linears to quantise, from ``quantize_plan``.
        num_workers: Processes, this one included; with a GPU, threads.
        is_checked: Decode every weight again and keep its error.
        shares_divisors: As ``WeightEncoder``.
        device: As ``WeightEncoder``.
        progress: Called with bytes read, bytes to read and the file's name.

    Raises:
        CheckpointError: A weight is not finite or a file is damaged; nothing is left behind.
        ConfigError: The destination is taken or cannot be written to, or the disk is too small.
        WorkerError: A worker was killed; what is finished stays, and the same call goes on from there.
    """
    final = Path(destination)
    _check_place(final)
    with sole_writer(final):
        return _quantize(
            source, final, schemes, num_workers, is_checked, shares_divisors, str(device), progress
        )


def _quantize(
    source: Source,
    final: Path,
    schemes: Mapping[str, WeightScheme],
    num_workers: int,
    is_checked: bool,
    shares_divisors: bool,
    device: str,
    progress: Progress | None,
) -> QuantizeResult:
    config = {**source.config, "quantization_config": quantization_json(source, schemes)}
    config.pop("compression_config", None)
    layouts = {file: shard_layout(source, names, schemes) for file, names in source.names_by_file().items()}
    _check_space(final, layouts)
    partial = final.with_name(f".{final.name}.partial")
    state = ConversionState.load(partial, _fingerprint(source, schemes, is_checked, shares_divisors))
    num_resumed = len(state.files)
    try:
        partial.mkdir(parents=True, exist_ok=True)
        conversion = Conversion(source, schemes, partial, shares_divisors, device, is_checked)
        run = ShardConversion(source, partial, state, progress=progress)
        with worker_pool(conversion, num_workers) as pool:
            run.run(layouts, pool)
        written = sum(state.files.values())
        _finish(source, partial, layouts, config)
        if final.is_dir():
            final.rmdir()
        partial.rename(final)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ConfigError(f"cannot write {final}: {error.strerror or error}") from None
    except WorkerError:
        raise
    except Exception:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return QuantizeResult(
        len(schemes),
        run.total,
        written,
        num_resumed,
        state.errors,
        num_workers,
        pool.cpu_s,
        pool.peak_rss_bytes,
    )


def _check_place(final: Path) -> None:
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise ConfigError(
            f"{final}: exists already; expected a folder that does not exist yet, or an empty one"
        )
    if not final.name or not final.parent.is_dir():
        raise ConfigError(f"cannot write {final}: the folder {final.parent} does not exist")


def _check_space(final: Path, layouts: Mapping[Path, Mapping[str, TensorSpec]]) -> None:
    needed = sum(spec.num_bytes for specs in layouts.values() for spec in specs.values()) + _SPARE_BYTES
    partial = final.with_name(f".{final.name}.partial")
    done = sum(size_of(file) for file in partial.glob("*.safetensors")) if partial.is_dir() else 0
    free = shutil.disk_usage(final.parent).free
    if free + done < needed:
        raise ConfigError(
            f"cannot write {final}: it takes {needed / 1e6:,.0f} MB, and {free / 1e6:,.0f} MB are free "
            "on that disk"
        )


def _fingerprint(
    source: Source, schemes: Mapping[str, WeightScheme], is_checked: bool, shares_divisors: bool
) -> str:
    """Return what tells one conversion from another: source files, schemes, options."""
    files = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in source.files()]
    chosen = sorted((module, repr(scheme)) for module, scheme in schemes.items())
    text = json.dumps([files, chosen, dict(source.config), is_checked, shares_divisors], default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _finish(
    source: Source,
    folder: Path,
    layouts: Mapping[Path, Mapping[str, TensorSpec]],
    config: Mapping[str, Any],
) -> None:
    """Write what goes beside the tensors; then nothing is left to go on from."""
    if len(layouts) > 1 or (source.path / _INDEX).exists():
        weight_map = {name: file.name for file, specs in layouts.items() for name in specs}
        total = sum(spec.num_bytes for specs in layouts.values() for spec in specs.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        atomic_write_json(folder / _INDEX, index)
    for file in sorted(source.path.iterdir()):
        is_weights = file.suffix == ".safetensors" or file.name == _INDEX
        if file.is_file() and not is_weights and file.name != "config.json":
            shutil.copyfile(file, folder / file.name)
    atomic_write_json(folder / "config.json", config)
    (folder / STATE_FILE).unlink()
