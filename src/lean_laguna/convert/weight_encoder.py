"""Quantises one linear after the other, rows by rows, straight from the source's files into the new ones."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import FileIO

import torch
from torch import Tensor

from lean_laguna.convert.modules import fused_set
from lean_laguna.convert.shard_writer import ShardWriter
from lean_laguna.convert.source import Source
from lean_laguna.core.errors import CheckpointError
from lean_laguna.quant.codec import encode, to_packed
from lean_laguna.quant.scaling import magnitude_bits
from lean_laguna.quant.scheme import WeightScheme
from lean_laguna.quant.scratch import Scratch

# Weights that are encoded at a time: what fits a core's cache, or keeps a device busy; whole blocks and words
# of every scheme.
_PIECE_WEIGHTS, _DEVICE_PIECE_WEIGHTS, _ROWS = 1 << 17, 1 << 24, 128
# NVFP4 weights are gone through twice, first in pieces so many times as large, and up to these are read once.
_LOOKED_AT, _HELD_BYTES = 4, 64 << 20
_ANYTHING, _ALIGNED = torch.empty(0), 16  # on the CPU
_TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True)
class WeightError:
    """How far a quantised linear is from the original.

    Attributes:
        sum_squares: Of the original weights.
        sum_square_errors: Of the differences.
        largest: Largest difference.
        num_weights: Weights.
    """

    sum_squares: float = 0.0
    sum_square_errors: float = 0.0
    largest: float = 0.0
    num_weights: int = 0

    def __add__(self, other: WeightError) -> WeightError:
        """Return the error of both together."""
        return WeightError(
            self.sum_squares + other.sum_squares,
            self.sum_square_errors + other.sum_square_errors,
            max(self.largest, other.largest),
            self.num_weights + other.num_weights,
        )

    @property
    def relative(self) -> float:
        """Root of the mean square difference over the root of the mean square weight."""
        return math.sqrt(self.sum_square_errors / self.sum_squares) if self.sum_squares else 0.0


class WeightEncoder:
    """Quantises linears of a source by scheme; may be called from several threads."""

    def __init__(
        self,
        source: Source,
        schemes: Mapping[str, WeightScheme],
        *,
        shares_divisors: bool = True,
        device: torch.device | str = "cpu",
    ):
        """Note which linears share an NVFP4 divisor.

        Args:
            source: Where the weights are.
            schemes: Of the linears to quantise.
            shares_divisors: Whether linears that a serving engine runs as one have one NVFP4 divisor, as it
                needs; else each has its own.
            device: Where weights are encoded; the bytes are the same everywhere.
        """
        self._source, self._schemes, self._device = source, schemes, torch.device(device)
        self._own = threading.local()
        # Plain numbers: a tensor kept among a conversion's short-lived ones would hold on to their memory.
        self._largest: dict[str, float] = {}
        self._lock = threading.Lock()
        self._sets: dict[str, list[str]] = {}
        self._set_of: dict[str, str] = {}
        for module, scheme in schemes.items():
            if scheme.number == "fp4":
                self._set_of[module] = fused_set(module) if shares_divisors else module
                self._sets.setdefault(self._set_of[module], []).append(module)

    def write(self, module: str, writer: ShardWriter, *, is_checked: bool = False) -> WeightError:
        """Quantise a linear into a file.

        Args:
            module: Its name.
            writer: The file, which has its tensors.
            is_checked: Whether to decode it again and compare.

        Raises:
            CheckpointError: A weight is not finite, or too large for the scheme.
        """
        error = WeightError()
        for first, piece, tensors in self.pieces(module):
            tensors.pop("weight_shape", None)  # of the piece
            for part, tensor in tensors.items():
                row = 0 if part == "weight_global_scale" else self.stored_row(module, part, first)
                writer.write(f"{module}.{part}", tensor.cpu(), row)
            if is_checked:
                error += self._compare(module, piece, tensors)
        if self._schemes[module].storage == "pack-quantized":
            writer.write(f"{module}.weight_shape", torch.tensor(self._source.shapes[module]))
        return error

    def pieces(self, module: str) -> Iterator[tuple[int, Tensor, dict[str, Tensor]]]:
        """Yield first row, weights [n, K] and their tensors, piece by piece, on the encoder's device.

        A piece's weights are lost when the next is asked for.

        Raises:
            CheckpointError: A weight is not finite, or too large for the scheme.
        """
        scheme = self._schemes[module]
        largest = self._largest_of_set(module) if scheme.number == "fp4" else None
        rows, columns = self._source.shapes[module]
        height = scheme.block[0] if scheme.block else 1
        step = math.lcm(_ROWS, height) * max(1, self._piece_weights // (columns * math.lcm(_ROWS, height)))
        for first, piece in self._read(module, rows if self._is_whole(module) else step):
            # An NVFP4 weight has been looked through for its largest, and its scales cannot overflow.
            found = self._largest_finite(module, piece) if largest is None else largest
            tensors = encode(piece, scheme, largest, self._scratch)
            if largest is None and not bool(tensors["weight_scale"].isfinite().all()):
                raise CheckpointError(
                    f"{self._where(module)}: weights up to {found.item():.3g} are too large for {scheme.name}"
                )
            yield first, piece, tensors

    def stored_row(self, module: str, part: str, first: int) -> int:
        """Return the row of a stored tensor at which a piece from weight row ``first`` on begins."""
        scheme = self._schemes[module]
        if part == "weight_scale" and scheme.block is not None:
            return first // scheme.block[0]
        if part == "weight_zero_point" and scheme.storage == "pack-quantized":
            return first * scheme.num_bits // 32
        return first

    def _is_whole(self, module: str) -> bool:
        return self._schemes[module].strategy == "tensor"

    @property
    def _piece_weights(self) -> int:
        return _PIECE_WEIGHTS if self._device.type == "cpu" else _DEVICE_PIECE_WEIGHTS

    @property
    def _scratch(self) -> Scratch:
        """The calling thread's."""
        if not hasattr(self._own, "scratch"):
            self._own.scratch = Scratch()
        scratch: Scratch = self._own.scratch
        return scratch

    @property
    def _held(self) -> dict[str, Tensor]:
        """Bytes of weights that the calling thread has in memory."""
        if not hasattr(self._own, "held"):
            self._own.held = {}
        held: dict[str, Tensor] = self._own.held
        return held

    def _read(self, module: str, step: int) -> Iterator[tuple[int, Tensor]]:
        rows, columns = self._source.shapes[module]
        kind = _TORCH[self._source.tensors.dtype_name(f"{module}.weight")]
        held = self._held.get(module)
        stream = None if held is not None else self._opened(module)
        with stream or contextlib.nullcontext():
            for first in range(0, rows, step):
                count = min(step, rows - first)
                if held is not None:
                    piece = held.view(kind).view(rows, columns)[first : first + count]
                else:
                    assert stream is not None
                    buffer = self._scratch.take("read", (count * columns,), _ANYTHING, kind)
                    self._fill(buffer, stream, module)
                    piece = buffer.view(count, columns)
                yield first, piece.to(self._device)

    def _hold(self, modules: list[str]) -> None:
        """Keep the calling thread's next weights in memory, instead of those before, if they are few."""
        self._held.clear()
        sizes = [-(-self._source.tensors.bytes_of(f"{m}.weight")[2] // _ALIGNED) * _ALIGNED for m in modules]
        if sum(sizes) > _HELD_BYTES:
            return
        buffer = self._scratch.take("held", (sum(sizes),), _ANYTHING, torch.uint8)
        for module, place in zip(modules, buffer.split(sizes), strict=True):
            weight = place[: self._source.tensors.bytes_of(f"{module}.weight")[2]]
            with self._opened(module) as stream:
                self._fill(weight, stream, module)
            self._held[module] = weight

    def _opened(self, module: str) -> FileIO:
        """Return the file of a weight, about to be read from its first byte on."""
        file, start, _ = self._source.tensors.bytes_of(f"{module}.weight")
        try:
            stream = FileIO(file)
            stream.seek(start)
        except OSError as error:
            raise CheckpointError(f"{self._where(module)}: cannot be read: {error.strerror}") from None
        return stream

    def _fill(self, buffer: Tensor, stream: FileIO, module: str) -> None:
        view, filled = buffer.view(torch.uint8).numpy().data, 0
        while filled < len(view):
            try:
                got = stream.readinto(view[filled:])
            except OSError as error:
                raise CheckpointError(f"{self._where(module)}: cannot be read: {error.strerror}") from None
            if not got:
                raise CheckpointError(f"{self._where(module)}: the file ended early")
            filled += got

    def _largest_of_set(self, module: str) -> Tensor:
        members = self._sets[self._set_of[module]]
        if module not in self._held:
            self._hold(members)
        kind = _TORCH[self._source.tensors.dtype_name(f"{module}.weight")]
        largest = max(self._largest_of(member) for member in members)
        return torch.tensor(largest, dtype=kind, device=self._device)

    def _largest_of(self, module: str) -> float:
        with self._lock:
            known = self._largest.get(module)
        if known is None:
            known = 0.0
            step = max(1, _LOOKED_AT * self._piece_weights // self._source.shapes[module][1])
            for _, piece in self._read(module, step):
                known = max(known, self._largest_finite(module, piece).item())
            with self._lock:
                self._largest[module] = known
        return known

    def _largest_finite(self, module: str, piece: Tensor) -> Tensor:
        """Return the largest magnitude of a piece.

        Raises:
            CheckpointError: A weight is not finite.
        """
        largest = magnitude_bits(piece, self._scratch).amax().view(piece.dtype)
        if not bool(largest.isfinite()):
            raise CheckpointError(
                f"{self._where(module)}: {int((~piece.isfinite()).sum())} or more values are not finite; "
                "expected none"
            )
        return largest

    def _compare(self, module: str, piece: Tensor, tensors: dict[str, Tensor]) -> WeightError:
        wide = piece.float()
        rows, columns = piece.shape
        decoded = to_packed(tensors, self._schemes[module], (rows, columns)).decode()
        difference = decoded.sub_(wide)
        return WeightError(
            wide.double().square_().sum().item(),
            difference.double().square_().sum().item(),
            difference.abs().max().item(),
            piece.numel(),
        )

    def _where(self, module: str) -> str:
        name = f"{module}.weight"
        return f"{self._source.tensors.file_of(name)}: tensor '{name}'"
