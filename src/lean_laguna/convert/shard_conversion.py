"""Converts files one after the other, each by all workers; while one is flushed, the next is encoded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from lean_laguna.convert.conversion_state import ConversionState
from lean_laguna.convert.modules import fused_set
from lean_laguna.convert.part_converter import Part
from lean_laguna.convert.read_ahead import ReadAhead
from lean_laguna.convert.shard_layout import WEIGHT
from lean_laguna.convert.shard_writer import ShardWriter
from lean_laguna.convert.source import Source
from lean_laguna.convert.weight_encoder import WeightError
from lean_laguna.convert.worker_pool import Worker, WorkerPool, wait_for
from lean_laguna.quant.scheme import TensorSpec

Progress = Callable[[int, int, str], None]
# Little against what a worker does in a second, much against what it takes to tell it.
_PART_BYTES = 16 << 20


class ShardConversion:
    """The conversion of a source's files into a folder."""

    def __init__(self, source: Source, folder: Path, state: ConversionState, *, progress: Progress | None):
        """Note what to convert.

        Args:
            source: The checkpoint.
            folder: Where the files go.
            state: Of an earlier run; kept up to date and on disk.
            progress: Called with bytes read, bytes to read and the file's name.
        """
        self._source, self._folder, self._state = source, folder, state
        self._progress, self._lock = progress, threading.Lock()
        self._sizes = {name: source.tensors.bytes_of(name)[2] for name in source.tensors.names()}
        self.total, self._done = sum(self._sizes.values()), 0

    def run(self, layouts: Mapping[Path, Mapping[str, TensorSpec]], pool: WorkerPool) -> None:
        """Convert all files but those that an earlier run has finished.

        Args:
            layouts: Tensors of each new file, by the source's file.
            pool: Who encodes.

        Raises:
            CheckpointError: A weight or file is damaged.
            ConfigError: The disk is full or fails.
            WorkerError: A worker has died.
        """
        names = self._source.names_by_file()
        flushed: Future[None] | None = None
        with ThreadPoolExecutor(1) as flusher:
            for file, specs in layouts.items():
                if file.name in self._state.files:
                    self._note(sum(self._sizes[name] for name in names[file]), file)
                    continue
                writer = self._convert(file, names[file], specs, pool)
                # Two unflushed files at most: what waits for the disk does not pile up.
                if flushed is not None:
                    _result(flushed, writer)
                flushed = flusher.submit(self._finish, writer)
            if flushed is not None:
                flushed.result()

    def _convert(
        self, file: Path, names: Sequence[str], specs: Mapping[str, TensorSpec], pool: WorkerPool
    ) -> ShardWriter:
        """Return a written file that is not flushed yet."""
        writer = ShardWriter(self._folder / file.name, specs)
        ahead = ReadAhead(file)
        try:
            parts = parts_of(file, names, self._sizes)
            wait_for([pool.submit(partial(self._one, part, ahead)) for part in parts])
        except BaseException:
            writer.discard()
            raise
        finally:
            ahead.close()
        return writer

    def _finish(self, writer: ShardWriter) -> None:
        try:
            writer.finish()
        except BaseException:
            writer.discard()
            raise
        with self._lock:
            self._state.files[writer.path.name] = writer.num_bytes
            self._state.save(self._folder)

    def _one(self, part: Part, ahead: ReadAhead, worker: Worker) -> None:
        ahead.note(self._source.tensors.bytes_of(part.names[0])[1])
        errors: dict[str, WeightError] = worker.run(part)
        with self._lock:
            self._state.errors.update(errors)
        self._note(part.num_bytes, part.file)

    def _note(self, num_bytes: int, file: Path) -> None:
        with self._lock:
            self._done += num_bytes
            if self._progress is not None:
                self._progress(self._done, self.total, file.name)


def parts_of(file: Path, names: Sequence[str], sizes: Mapping[str, int]) -> Iterator[Part]:
    """Yield a file's tensors in parts of some size, in order; what shares a divisor is in one part."""
    sets: dict[str, list[str]] = {}
    for name in names:
        sets.setdefault(fused_set(name.removesuffix(WEIGHT)), []).append(name)
    gathered: list[str] = []
    num_bytes = 0
    for members in sets.values():
        gathered += members
        num_bytes += sum(sizes[name] for name in members)
        if num_bytes >= _PART_BYTES:
            yield Part(file, tuple(gathered), num_bytes)
            gathered, num_bytes = [], 0
    if gathered:
        yield Part(file, tuple(gathered), num_bytes)


def _result(flushed: Future[None], writer: ShardWriter) -> None:
    """Wait for a file to be flushed; where that fails, give up the next one too."""
    try:
        flushed.result()
    except BaseException:
        writer.discard()
        raise
