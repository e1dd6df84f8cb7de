"""Workers that do parts of a job side by side: a thread of this process, and further processes.

Processes, because every small operation takes Python's lock: threads bring nothing. They are told what to do
over a pipe and end when it closes, so none outlives this process however it ends. An interrupt from the
terminal does not reach them: what they have begun they finish, and are told to end.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from lean_laguna.core.errors import ConfigError, WorkerError

_MODULE = "lean_laguna.convert.worker"
_LEFT_TO_END_S = 5.0
# Of the workers on a CPU, those that are this process itself.
_OWN_THREADS = 1


class Worker(Protocol):
    """Who does parts of a job, here or in another process."""

    def run(self, part: Any) -> Any:
        """Do a part and return what comes of it."""


class OwnWorker(Worker, Protocol):
    """A worker in this process; may be called from several threads."""

    def close(self) -> None:
        """Let go of what it holds."""


class Job(Protocol):
    """What workers are for. Jobs, parts and what comes of them are pickled for other processes."""

    @property
    def device(self) -> str:
        """Where the work is done."""

    def portable(self) -> Job:
        """Return it as another process is sent it."""

    def start(self) -> OwnWorker:
        """Return a worker for it."""


class WorkerPool:
    """A fixed number of workers; tasks go to whichever is free.

    Attributes:
        cpu_s: Time that processes have taken, once the pool is closed.
        peak_rss_bytes: Memory that processes have taken at most, all together.
    """

    def __init__(self, job: Job, *, num_threads: int = 1, num_processes: int = 0):
        """Start workers.

        Args:
            job: What they do.
            num_threads: Workers in this process.
            num_processes: Workers in processes of their own.

        Raises:
            ConfigError: No process can be started.
        """
        self.cpu_s, self.peak_rss_bytes = 0.0, 0
        self._here = job.start()
        self._free: SimpleQueue[Worker] = SimpleQueue()
        self._processes: list[_Process] = []
        self._joining: list[threading.Thread] = []
        self._children_cpu_s = _children_cpu_s()
        self._threads = ThreadPoolExecutor(num_threads + num_processes)
        for _ in range(num_threads):
            self._free.put(self._here)
        try:
            for _ in range(num_processes):
                self._processes.append(_Process())
        except OSError as error:
            self.close()
            raise ConfigError(
                f"cannot start a worker process: {error.strerror or error}; expected fewer --workers"
            ) from None
        message = pickle.dumps(job.portable()) if num_processes else b""
        # They take a second to start: until then the others work alone.
        self._joining = [
            threading.Thread(target=self._join, args=(process, message), daemon=True)
            for process in self._processes
        ]
        for thread in self._joining:
            thread.start()

    def submit(self, task: Callable[[Worker], None]) -> Future[None]:
        """Have a task done with the next worker that is free."""
        return self._threads.submit(self._run, task)

    def close(self) -> None:
        """End all workers; what was submitted must be done or cancelled."""
        for process in self._processes:
            process.end()
        self._threads.shutdown()
        for thread in self._joining:
            thread.join()
        for process in self._processes:
            process.close()
        self._here.close()
        self.cpu_s = _children_cpu_s() - self._children_cpu_s
        self.peak_rss_bytes = sum(process.peak_rss_bytes for process in self._processes)

    def _join(self, process: _Process, message: bytes) -> None:
        process.start(message)
        # One that has died already says so with its first part.
        self._free.put(process)

    def _run(self, task: Callable[[Worker], None]) -> None:
        worker = self._free.get()
        try:
            task(worker)
        finally:
            self._free.put(worker)


@contextlib.contextmanager
def worker_pool(job: Job, num_workers: int) -> Iterator[WorkerPool]:
    """Yield workers of one core each: threads where a GPU encodes, else this process and further ones."""
    num_torch_threads = torch.get_num_threads()
    is_cpu = job.device == "cpu"
    torch.set_num_threads(1)
    pool = WorkerPool(
        job,
        num_threads=_OWN_THREADS if is_cpu else num_workers,
        num_processes=num_workers - _OWN_THREADS if is_cpu else 0,
    )
    try:
        yield pool
    finally:
        pool.close()
        torch.set_num_threads(num_torch_threads)


def wait_for(tasks: Sequence[Future[None]]) -> None:
    """Wait for all tasks; on the first failure, or an interrupt, give up those that have not begun."""
    try:
        for task in tasks:
            task.result()
    except BaseException:
        for task in tasks:
            task.cancel()
        wait(tasks)
        raise


class _Process:
    """A worker process and the pipes to it."""

    def __init__(self) -> None:
        self.peak_rss_bytes = 0
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", _MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            process_group=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout

    def start(self, message: bytes) -> None:
        """Tell it what it is for, and wait until it is ready or dead."""
        with contextlib.suppress(OSError, ValueError):
            self._to.write(message)
            self._to.flush()
            self._from.read(1)

    def run(self, part: Any) -> Any:
        """Have it do a part.

        Raises:
            LeanLagunaError: Its error.
            WorkerError: It has died.
        """
        try:
            pickle.dump(part, self._to)
            self._to.flush()
            answer, self.peak_rss_bytes = pickle.load(self._from)
        except (OSError, EOFError, ValueError, pickle.UnpicklingError):
            raise WorkerError(
                f"a worker process {self._how_it_ended()}; the finished files are kept: run the same command "
                "again to go on, with fewer --workers if memory is short"
            ) from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def end(self) -> None:
        """Have it end, whatever it does."""
        with contextlib.suppress(OSError):
            self._process.terminate()

    def close(self) -> None:
        """Wait for its end, and close the pipes."""
        try:
            self._process.wait(_LEFT_TO_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._to, self._from):
            with contextlib.suppress(OSError):
                pipe.close()

    def _how_it_ended(self) -> str:
        try:
            status = self._process.wait(_LEFT_TO_END_S)
        except subprocess.TimeoutExpired:
            return "answers nothing"
        if status < 0:
            return f"was killed ({signal.Signals(-status).name})"
        return f"ended by itself with status {status}"


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
