"""Quantises a checkpoint without data, file by file, in little memory; what was done survives a kill.

The result is built in a hidden folder beside its place and moved there whole. An error removes that folder; a
kill or Ctrl-C leaves its finished files, from which the same command goes on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lean_laguna.convert.quantize_config import quantization_json
from lean_laguna.convert.shard_writer import ShardWriter
from lean_laguna.convert.source import Source
from lean_laguna.convert.weight_encoder import WeightEncoder, WeightError, encoder_pool
from lean_laguna.core.errors import ConfigError
from lean_laguna.core.files import atomic_write_json, parse_json
from lean_laguna.quant.scheme import TensorSpec, WeightScheme

_STATE, _INDEX = "conversion.json", "model.safetensors.index.json"
# Left over on the disk beside the result: other files, the file system's own.
_SPARE_BYTES = 64 << 20
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class QuantizeResult:
    """What a conversion did.

    Attributes:
        num_modules: Linears quantised.
        source_bytes: Of all tensors before.
        written_bytes: Of all files with tensors after.
        num_resumed_files: Files that an earlier run had finished.
        errors: Per linear, where asked for.
    """

    num_modules: int
    source_bytes: int
    written_bytes: int
    num_resumed_files: int
    errors: Mapping[str, WeightError]


@dataclass
class _State:
    """What has been finished, on disk after every file."""

    fingerprint: str
    files: dict[str, int] = field(default_factory=dict)
    errors: dict[str, WeightError] = field(default_factory=dict)

    def save(self, folder: Path) -> None:
        errors = {module: dataclasses.astuple(error) for module, error in self.errors.items()}
        written = {"fingerprint": self.fingerprint, "files": self.files, "errors": errors}
        atomic_write_json(folder / _STATE, written)

    @staticmethod
    def load(folder: Path, fingerprint: str) -> _State:
        """Return the state of an earlier run of the same conversion, else a new one."""
        try:
            found = parse_json((folder / _STATE).read_text(encoding="utf-8"))
            state = _State(
                found["fingerprint"],
                {name: size for name, size in found["files"].items() if _size(folder / name) == size},
                {module: WeightError(*values) for module, values in found["errors"].items()},
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            state = _State("")
        if state.fingerprint == fingerprint:
            return state
        shutil.rmtree(folder, ignore_errors=True)
        return _State(fingerprint)


def quantize(
    source: Source,
    destination: str | Path,
    schemes: Mapping[str, WeightScheme],
    *,
    num_workers: int = 1,
    is_checked: bool = False,
    shares_divisors: bool = True,
    progress: Progress | None = None,
) -> QuantizeResult:
    """Quantise linears of a checkpoint into a new folder; all else is copied byte for byte.

    Args:
        source: The checkpoint.
        destination: A folder that does not exist yet, or an empty one.
        schemes: Of the linears to quantise, from ``quantize_plan``.
        num_workers: Threads.
        is_checked: Decode every weight again and keep its error.
        shares_divisors: As ``WeightEncoder``.
        progress: Called with bytes read, bytes to read and the file's name.

    Raises:
        CheckpointError: A weight is not finite or a file is damaged; nothing is left behind.
        ConfigError: The destination is taken or cannot be written to, or the disk is too small.
    """
    final = Path(destination)
    config = {**source.config, "quantization_config": quantization_json(source, schemes)}
    config.pop("compression_config", None)
    layouts = {file: _layout(source, file, schemes) for file in source.files()}
    _check_destination(source, final, layouts)
    partial = final.with_name(f".{final.name}.partial")
    state = _State.load(partial, _fingerprint(source, schemes, is_checked, shares_divisors))
    num_resumed = len(state.files)
    try:
        partial.mkdir(parents=True, exist_ok=True)
        encoder = WeightEncoder(source, schemes, shares_divisors=shares_divisors)
        run = _Run(source, partial, encoder, state, is_checked, progress)
        with encoder_pool(num_workers) as pool:
            for file, specs in layouts.items():
                run.convert(file, specs, schemes, pool)
        written = sum(state.files.values())
        _finish(source, partial, layouts, config)
        if final.is_dir():
            final.rmdir()
        partial.rename(final)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ConfigError(f"cannot write {final}: {error.strerror or error}") from None
    except Exception:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return QuantizeResult(len(schemes), run.total, written, num_resumed, state.errors)


class _Run:
    """The conversion of files, one after the other, each by all threads."""

    def __init__(
        self,
        source: Source,
        folder: Path,
        encoder: WeightEncoder,
        state: _State,
        is_checked: bool,
        progress: Progress | None,
    ):
        self._source, self._folder, self._encoder, self._state = source, folder, encoder, state
        self._is_checked, self._progress, self._lock = is_checked, progress, threading.Lock()
        self._sizes = {name: source.tensors.bytes_of(name)[2] for name in source.tensors.names()}
        self.total, self._done = sum(self._sizes.values()), 0

    def convert(
        self,
        file: Path,
        specs: Mapping[str, TensorSpec],
        schemes: Mapping[str, WeightScheme],
        pool: ThreadPoolExecutor,
    ) -> None:
        """Write one file, unless an earlier run has."""
        names = [name for name in self._source.tensors.names() if self._source.tensors.file_of(name) == file]
        if file.name in self._state.files:
            self._note(sum(self._sizes[name] for name in names), file)
            return
        writer = ShardWriter(self._folder / file.name, specs, {"format": "pt"})
        try:
            tasks = [pool.submit(self._one, name, schemes, writer, file) for name in names]
            _await(tasks)
            writer.finish()
        except BaseException:
            writer.discard()
            raise
        self._state.files[file.name] = writer.num_bytes
        self._state.save(self._folder)

    def _one(self, name: str, schemes: Mapping[str, WeightScheme], writer: ShardWriter, file: Path) -> None:
        module = name.removesuffix(".weight")
        if module in schemes and name.endswith(".weight"):
            error = self._encoder.write(module, writer, is_checked=self._is_checked)
            if self._is_checked:
                with self._lock:
                    self._state.errors[module] = error
        else:
            writer.copy(name, *self._source.tensors.bytes_of(name)[:2])
        self._note(self._sizes[name], file)

    def _note(self, num_bytes: int, file: Path) -> None:
        with self._lock:
            self._done += num_bytes
            if self._progress is not None:
                self._progress(self._done, self.total, file.name)


def _await(tasks: list[Future[None]]) -> None:
    """Wait for all tasks; on the first failure, or an interrupt, give up those that have not begun."""
    try:
        for task in tasks:
            task.result()
    except BaseException:
        for task in tasks:
            task.cancel()
        wait(tasks)
        raise


def _layout(source: Source, file: Path, schemes: Mapping[str, WeightScheme]) -> dict[str, TensorSpec]:
    """Return the tensors that a file of the source becomes, in its order."""
    tensors = source.tensors
    names = [name for name in tensors.names() if tensors.file_of(name) == file]
    specs: dict[str, TensorSpec] = {}
    for name in sorted(names, key=lambda name: tensors.bytes_of(name)[1]):
        module = name.removesuffix(".weight")
        kind = tensors.dtype_name(name)
        if module in schemes and name.endswith(".weight"):
            parts = schemes[module].tensors(*source.shapes[module], scale_dtype=kind)
            specs |= {f"{module}.{part}": spec for part, spec in parts.items()}
        else:
            specs[name] = TensorSpec(tensors.shape(name), kind)
    # Wide types first, so that every tensor begins at a multiple of its element's size.
    return dict(sorted(specs.items(), key=lambda item: -item[1].element_bytes))


def _check_destination(source: Source, final: Path, layouts: Mapping[Path, Mapping[str, TensorSpec]]) -> None:
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise ConfigError(
            f"{final}: exists already; expected a folder that does not exist yet, or an empty one"
        )
    if not final.name or not final.parent.is_dir():
        raise ConfigError(f"cannot write {final}: the folder {final.parent} does not exist")
    needed = sum(spec.num_bytes for specs in layouts.values() for spec in specs.values()) + _SPARE_BYTES
    partial = final.with_name(f".{final.name}.partial")
    done = sum(_size(file) for file in partial.glob("*.safetensors")) if partial.is_dir() else 0
    free = shutil.disk_usage(final.parent).free
    if free + done < needed:
        raise ConfigError(
            f"cannot write {final}: it takes {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free on that "
            "disk"
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
    """Write what goes beside the tensors; the config last."""
    if len(layouts) > 1 or (source.path / _INDEX).exists():
        weight_map = {name: file.name for file, specs in layouts.items() for name in specs}
        total = sum(spec.num_bytes for specs in layouts.values() for spec in specs.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        atomic_write_json(folder / _INDEX, index)
    for file in sorted(source.path.iterdir()):
        is_weights = file.suffix == ".safetensors" or file.name == _INDEX
        if file.is_file() and not is_weights and file.name != "config.json":
            shutil.copyfile(file, folder / file.name)
    (folder / _STATE).unlink()
    atomic_write_json(folder / "config.json", config)


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else -1
