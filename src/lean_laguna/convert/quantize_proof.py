"""Proves the quantiser on another checkpoint: its own quantised weights, made again from their source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lean_laguna.convert.modules import fused_set, plain_name
from lean_laguna.convert.quantize_plan import as_written
from lean_laguna.convert.source import Source
from lean_laguna.convert.weight_encoder import WeightEncoder
from lean_laguna.convert.worker_pool import Worker, wait_for, worker_pool
from lean_laguna.core.errors import CheckpointError, ConfigError
from lean_laguna.models.quantised_reader import QuantisedReader
from lean_laguna.quant.scheme import WeightScheme

_OTHER_NAMES = {
    "weight_packed": ("weight",),
    "weight_scale": ("weight_scale_inv",),
    "weight_global_scale": ("weight_scale_2",),
}


@dataclass(frozen=True)
class Proof:
    """Bytes of a checkpoint that the quantiser makes again, and those that it makes otherwise.

    Attributes:
        num_modules: Linears made again.
        num_weights: Their weights.
        num_bytes: Their bytes: codes, scales, divisors, zero points.
        num_differing_bytes: Of these, the ones that differ.
        differing_modules: The linears with a differing byte.
        has_shared_divisors: Whether linears that run as one have one NVFP4 divisor there.
    """

    num_modules: int
    num_weights: int
    num_bytes: int
    num_differing_bytes: int
    differing_modules: tuple[str, ...]
    has_shared_divisors: bool


def prove(source: Source, model: Source, *, num_workers: int = 1) -> Proof:
    """Quantise again, from their source, the linears that a checkpoint has quantised, and compare bytes.

    Args:
        source: Holds these linears unquantised.
        model: The quantised checkpoint.
        num_workers: Processes, this one included.

    Raises:
        CheckpointError: A weight is damaged, or the two checkpoints do not fit each other.
        ConfigError: The source holds none of these linears unquantised.
        WorkerError: A worker was killed.
    """
    ours = {plain_name(module): module for module in source.shapes if module not in source.quantised}
    pairs = {ours[plain_name(module)]: module for module in model.quantised if plain_name(module) in ours}
    if not pairs:
        raise ConfigError(
            f"{source.path}: holds none of the linears unquantised that {model.path} has quantised; expected "
            "the checkpoint that it was made from"
        )
    schemes = {own: as_written(model.quantised[theirs]) for own, theirs in pairs.items()}
    for own, theirs in pairs.items():
        if source.shapes[own] != model.shapes[theirs]:
            raise CheckpointError(
                f"{model.path}: '{theirs}' has shape {list(model.shapes[theirs])}, but "
                f"{list(source.shapes[own])} in {source.path}"
            )
    is_shared = shares_divisors(model)
    counts: dict[str, tuple[int, int]] = {}
    with worker_pool(_Comparison(source, model, schemes, is_shared), num_workers) as pool:
        tasks = [pool.submit(partial(_count, part, counts)) for part in _parts(pairs)]
        wait_for(tasks)
    differing = tuple(theirs for own, theirs in pairs.items() if counts[own][1])
    return Proof(
        len(pairs),
        sum(source.shapes[own][0] * source.shapes[own][1] for own in pairs),
        sum(total for total, _ in counts.values()),
        sum(odd for _, odd in counts.values()),
        differing,
        is_shared,
    )


def shares_divisors(model: Source) -> bool:
    """Return whether a checkpoint's fused linears have one NVFP4 divisor; without any NVFP4, true."""
    sets: dict[str, list[str]] = {}
    for module, scheme in model.quantised.items():
        if scheme.number == "fp4":
            sets.setdefault(fused_set(module), []).append(module)
    for members in sets.values():
        found = [model.tensors.get(f"{m}.{_divisor_name(model.quantised[m])}").float() for m in members]
        if any(not torch.equal(found[0].view(-1), other.view(-1)) for other in found):
            return False
    return True


def _divisor_name(scheme: WeightScheme) -> str:
    return "weight_scale_2" if scheme.spelling == "modelopt" else "weight_global_scale"


@dataclass(frozen=True)
class _Comparison:
    """The job of the proof's workers."""

    source: Source
    model: Source
    schemes: Mapping[str, WeightScheme]
    is_shared: bool
    device: str = "cpu"

    def portable(self) -> _Comparison:
        """Return it as another process is sent it."""
        return self

    def start(self) -> _Comparer:
        """Return a worker for it."""
        return _Comparer(self)


class _Comparer:
    """Makes linears again and counts the bytes that differ."""

    def __init__(self, job: _Comparison):
        self._job = job
        self._encoder = WeightEncoder(job.source, job.schemes, shares_divisors=job.is_shared)

    def run(self, part: Sequence[tuple[str, str]]) -> dict[str, tuple[int, int]]:
        """Return bytes, and those that differ, of linears named as in the source and as in the other."""
        return {own: _compare(self._encoder, self._job.model, own, theirs) for own, theirs in part}

    def close(self) -> None:
        """Hold nothing."""


def _parts(pairs: Mapping[str, str]) -> list[list[tuple[str, str]]]:
    """Return linears in parts; what shares a divisor is in one."""
    parts: dict[str, list[tuple[str, str]]] = {}
    for own, theirs in pairs.items():
        parts.setdefault(fused_set(own), []).append((own, theirs))
    return list(parts.values())


def _count(part: Sequence[tuple[str, str]], counts: dict[str, tuple[int, int]], worker: Worker) -> None:
    counts.update(worker.run(part))


def _compare(encoder: WeightEncoder, model: Source, own: str, theirs: str) -> tuple[int, int]:
    """Return the bytes of a linear and those that differ."""
    num_bytes = num_differing = 0
    stored: dict[str, Tensor] = {}
    for first, _, tensors in encoder.pieces(own):
        for part, tensor in tensors.items():
            if part == "weight_shape" or (part == "weight_global_scale" and first):
                continue
            tensor = tensor.cpu()
            if part not in stored:
                stored[part] = _stored(model, theirs, part)
            row = 0 if part == "weight_global_scale" else encoder.stored_row(own, part, first)
            whole = stored[part]
            if whole.ndim < tensor.ndim:
                whole = whole.reshape(-1, *tensor.shape[1:])
            expected = whole[row : row + tensor.shape[0]].reshape(tensor.shape)
            if expected.dtype != tensor.dtype:
                tensor = tensor.to(expected.dtype)
            num_bytes += expected.nbytes
            num_differing += int((_raw(expected) != _raw(tensor)).sum())
    return num_bytes, num_differing


def _stored(model: Source, module: str, part: str) -> Tensor:
    """Return a stored tensor, whatever the checkpoint's spelling calls it."""
    assert isinstance(model.reader, QuantisedReader), "it has quantised linears"
    parts = model.reader.parts_of(f"{module}.weight")
    name = next(name for name in (part, *_OTHER_NAMES.get(part, ())) if name in parts)
    tensor = model.tensors.get(parts[name])
    return 1.0 / tensor if name == "weight_scale_2" else tensor


def _raw(tensor: Tensor) -> Tensor:
    return tensor.new_empty(tensor.shape).copy_(tensor).view(-1).view(torch.uint8)
