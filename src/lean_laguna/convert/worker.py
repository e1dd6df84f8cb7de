"""A worker process of ``worker_pool``: does the parts that it is sent, until the pipe closes.

Comes in: a job, then parts. Goes out: a byte once it is ready, then per part what came of it, or the error,
and the largest memory so far.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import traceback
from typing import BinaryIO

import torch

from lean_laguna.core.errors import LeanLagunaError
from lean_laguna.core.memory import peak_rss_bytes


def serve(asked: BinaryIO, answers: BinaryIO) -> None:
    """Answer until there is no more to do, or nobody who listens."""
    with contextlib.suppress(EOFError, BrokenPipeError):
        worker = pickle.load(asked).start()
        answers.write(b"\n")
        answers.flush()
        while True:
            part = pickle.load(asked)
            answer: object
            try:
                answer = worker.run(part)
            except LeanLagunaError as error:
                answer = error
            except Exception:
                answer = RuntimeError(f"in a worker process:\n{traceback.format_exc()}")
            pickle.dump((answer, peak_rss_bytes()), answers)
            answers.flush()


def main() -> None:
    """Serve on the standard streams; whatever else prints goes to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    torch.set_num_threads(1)
    serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
