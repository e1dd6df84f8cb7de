"""Converts files one after the other, each by all threads; while one is flushed, the next is encoded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from lean_laguna.convert.conversion_state import ConversionState
from lean_laguna.convert.read_ahead import ReadAhead
from lean_laguna.convert.shard_writer import ShardWriter
from lean_laguna.convert.source import Source
from lean_laguna.convert.weight_encoder import WeightEncoder, WeightError
from lean_laguna.quant.scheme import TensorSpec, WeightScheme

Progress = Callable[[int, int, str], None]
_WEIGHT = ".weight"


class ShardConversion:
    """The conversion of a source's files into a folder."""

    def __init__(
        self,
        source: Source,
        folder: Path,
        encoder: WeightEncoder,
        state: ConversionState,
        *,
        is_checked: bool,
        progress: Progress | None,
    ):
        """Note what to convert.

        Args:
            source: The checkpoint.
            folder: Where the files go.
            encoder: Of the linears to quantise.
            state: Of an earlier run; kept up to date and on disk.
            is_checked: Decode every weight again and keep its error.
            progress: Called with bytes read, bytes to read and the file's name.
        """
        self._source, self._folder, self._encoder, self._state = source, folder, encoder, state
        self._is_checked, self._progress, self._lock = is_checked, progress, threading.Lock()
        self._sizes = {name: source.tensors.bytes_of(name)[2] for name in source.tensors.names()}
        self.total, self._done = sum(self._sizes.values()), 0

    def run(
        self,
        layouts: Mapping[Path, Mapping[str, TensorSpec]],
        schemes: Mapping[str, WeightScheme],
        pool: ThreadPoolExecutor,
    ) -> None:
        """Convert all files but those that an earlier run has finished.

        Args:
            layouts: Tensors of each new file, by the source's file.
            schemes: Of the linears to quantise.
            pool: Threads that encode.

        Raises:
            CheckpointError: A weight or file is damaged.
            ConfigError: The disk is full or fails.
        """
        names = self._source.names_by_file()
        flushed: Future[None] | None = None
        with ThreadPoolExecutor(1) as flusher:
            for file, specs in layouts.items():
                if file.name in self._state.files:
                    self._note(sum(self._sizes[name] for name in names[file]), file)
                    continue
                writer = self._convert(file, names[file], specs, schemes, pool)
                # Two unflushed files at most: what waits for the disk does not pile up.
                if flushed is not None:
                    _result(flushed, writer)
                flushed = flusher.submit(self._finish, writer)
            if flushed is not None:
                flushed.result()

    def _convert(
        self,
        file: Path,
        names: list[str],
        specs: Mapping[str, TensorSpec],
        schemes: Mapping[str, WeightScheme],
        pool: ThreadPoolExecutor,
    ) -> ShardWriter:
        """Return a written file that is not flushed yet."""
        writer = ShardWriter(self._folder / file.name, specs, {"format": "pt"})
        ahead = ReadAhead(file)
        try:
            tasks = [pool.submit(self._one, name, schemes, writer, ahead, file) for name in names]
            _await(tasks)
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

    def _one(
        self,
        name: str,
        schemes: Mapping[str, WeightScheme],
        writer: ShardWriter,
        ahead: ReadAhead,
        file: Path,
    ) -> None:
        module = name.removesuffix(_WEIGHT)
        place = self._source.tensors.bytes_of(name)[1]
        ahead.note(place)
        if module in schemes and name.endswith(_WEIGHT):
            error = self._encoder.write(module, writer, is_checked=self._is_checked)
            if self._is_checked:
                self._keep(module, error)
        else:
            writer.copy(name, file, place)
        self._note(self._sizes[name], file)

    def _keep(self, module: str, error: WeightError) -> None:
        with self._lock:
            self._state.errors[module] = error

    def _note(self, num_bytes: int, file: Path) -> None:
        with self._lock:
            self._done += num_bytes
            if self._progress is not None:
                self._progress(self._done, self.total, file.name)


def _result(flushed: Future[None], writer: ShardWriter) -> None:
    """Wait for a file to be flushed; where that fails, give up the next one too."""
    try:
        flushed.result()
    except BaseException:
        writer.discard()
        raise


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
