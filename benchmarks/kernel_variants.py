"""CUDA C++ kernels compiled otherwise, for benchmarks: with stamps of where time goes, or without waiting."""

from __future__ import annotations

import contextlib
import ctypes
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from lean_laguna.kernels.cuda import attention, driver, launching, packed_products, products
from lean_laguna.kernels.cuda.compiler import Source

STAMPED_BLOCKS = 528
PLACES = ("started", "asked", "waited", "prepared", "routed", "first", "ended")
"""As ``common.cuh`` names them; what ``routed`` and ``first`` mean is each kernel's own."""


@contextlib.contextmanager
def variant(**constants: int) -> Iterator[list[tuple[Source, int, int]]]:
    """Launch all kernels with more constants inside; return source, grid and shared bytes of each launch."""
    launched: list[tuple[Source, int, int]] = []
    keep = launching.launch_kernel

    def launch(source: Source, grid: int, threads: int, shared: int, *args: Any, **options: Any) -> None:
        changed = Source.of(source.name, **dict(source.constants) | constants)
        launched.append((changed, grid, shared))
        keep(changed, grid, threads, shared, *args, **options)

    try:
        for module in (attention, products, packed_products):
            module.launch_kernel = launch  # type: ignore[attr-defined]
        yield launched
    finally:
        for module in (attention, products, packed_products):
            module.launch_kernel = keep  # type: ignore[attr-defined]


@contextlib.contextmanager
def changed(module: ModuleType, values: dict[str, Any]) -> Iterator[None]:
    """Have a module's constants or functions changed inside."""
    keep = {name: getattr(module, name) for name in values}
    try:
        for name, value in values.items():
            setattr(module, name, value)
        yield
    finally:
        for name, value in keep.items():
            setattr(module, name, value)


def _stamps(source: Source, shared: int) -> list[list[int]]:
    """Return a kernel's stamps, block by block, nanoseconds; zeros where none was."""
    cuda, module = driver._cuda(), ctypes.c_void_p()
    address, size = ctypes.c_uint64(), ctypes.c_size_t()
    driver._check(cuda.cuFuncGetModule(ctypes.byref(module), driver._function(source, 0, shared)), "module")
    found = cuda.cuModuleGetGlobal_v2(ctypes.byref(address), ctypes.byref(size), module, b"stamps")
    driver._check(found, "stamps")
    values = (ctypes.c_uint64 * (size.value // 8))()
    driver._check(cuda.cuMemcpyDtoH_v2(values, address, size), "copy of stamps")
    n = len(PLACES) + 1  # the last is the multiprocessor
    return [list(values[i : i + n]) for i in range(0, len(values), n)]


def last_layer(
    launched: list[tuple[Source, int, int]], replay: Callable[[], None], times: int = 20
) -> list[str]:
    """Return lines on where the blocks of a step's last layer were: least, middle and most, in microseconds.

    Args:
        launched: What the step launched, from ``variant``; qkv, attention, output, router, up and down last.
        replay: Runs the step, and waits for its end.
        times: To run it.
    """
    names = ("qkv", "attention", "output", "router", "up", "down")
    sums: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
    ends: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(times):
        replay()
        tables = [_stamps(source, shared) for source, _, shared in launched[-6:]]
        zero = min(row[2] for row in tables[0] if row[2])
        for name, table in zip(names, tables, strict=True):
            for row in table:
                if row[len(PLACES) - 1]:
                    ends[name][row[-1]].append((row[len(PLACES) - 1] - zero) / 1000)
            for i, place in enumerate(PLACES):
                at = sorted((row[i] - zero) / 1000 for row in table if row[i])
                if at:
                    sums[name, place].append([at[0], statistics.median(at), at[-1], len(at)])
    lines = []
    for (name, place), rows in sums.items():
        least, middle, most, count = (statistics.mean(column) for column in zip(*rows, strict=True))
        lines.append(f"{name:9} {place:8} {least:7.2f} {middle:7.2f} {most:7.2f}  {count:.0f} blocks")
    for name in ("qkv", "up"):
        late = sorted((statistics.mean(times), at) for at, times in ends[name].items())
        shown = (f"{at}: {time:.2f}" for time, at in late[:5] + late[-15:])
        lines.append(f"{name} ended, by multiprocessor, first 5 and last 15: " + ", ".join(shown))
    return lines
