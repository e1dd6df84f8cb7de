"""Compile every kernel that a set of launches needs, side by side, before the first of them runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import triton
from triton.runtime.jit import JITFunction

MAX_THREADS = 16


def compile_ahead(runs: Sequence[Callable[[], object]]) -> None:
    """Compile what the runs would launch, launching nothing; what fails to compile will say so when launched.

    Args:
        runs: Each launches Triton kernels and nothing that reads their results.
    """
    launch = JITFunction.run

    def dry(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(kernel, *args, grid=grid, warmup=True, **options)

    JITFunction.run = dry
    try:
        with (
            ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool,
            triton.AsyncCompileMode(pool, ignore_errors=True),
        ):
            for run in runs:
                run()
    finally:
        JITFunction.run = launch
