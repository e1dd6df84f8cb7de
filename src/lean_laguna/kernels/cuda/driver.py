"""Loads compiled kernels into the current CUDA context and launches them on PyTorch's current stream."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from lean_laguna.kernels.cuda.compiler import Source, compiled

Argument = Tensor | int | float | None
"""Of a kernel: a tensor's address, a 32-bit integer or float, or a null pointer."""

_EARLY_LAUNCH = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_MAX_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, percent
_SHARED_OPTIN = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
_STACK_SIZE = 0  # CU_LIMIT_STACK_SIZE, bytes a thread


class _Attribute(ctypes.Structure):
    _fields_ = [
        ("id", ctypes.c_int),
        ("pad", ctypes.c_char * 4),
        ("value", ctypes.c_int),
        ("rest", ctypes.c_char * 60),
    ]


class _Configuration(ctypes.Structure):
    _fields_ = [
        *((f"{kind}_{axis}", ctypes.c_uint) for kind in ("grid", "block") for axis in "xyz"),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    ]


def _check(status: int, what: str) -> None:
    if status:
        text = ctypes.c_char_p()
        _cuda().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{what}: CUDA error {status}, {(text.value or b'').decode()}")


@functools.cache
def _cuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def architecture(device_index: int) -> str:
    """Return a device's architecture, ``sm_90`` say."""
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device_index))


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors share the work; a few where there is no GPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may have; an H200's where there is no GPU."""
    if device.type != "cuda":
        return 232_448
    index = torch.cuda.current_device() if device.index is None else device.index
    found = ctypes.c_int()
    _check(_cuda().cuDeviceGetAttribute(ctypes.byref(found), _SHARED_OPTIN, index), "shared memory")
    return found.value


@functools.cache
def has_bulk_copies(device: torch.device) -> bool:
    """Say whether the copy engine brings rows into shared memory: from Hopper on."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] >= 9


@functools.cache
def _function(source: Source, device_index: int, shared_bytes: int) -> ctypes.c_void_p:
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    code = compiled(source, architecture(device_index))
    _check(_cuda().cuModuleLoadData(ctypes.byref(module), code), source.name)
    _check(_cuda().cuModuleGetFunction(ctypes.byref(function), module, source.name.encode()), source.name)
    _check(
        _cuda().cuFuncSetAttribute(function, _MAX_SHARED, shared_bytes),
        f"{source.name}: {shared_bytes} bytes",
    )
    # All of L1 as shared memory, where weights land: a multiprocessor must run empty before it can change the
    # split, and kernels overlap.
    _check(_cuda().cuFuncSetAttribute(function, _CARVEOUT, 100), source.name)
    return function


def stack_size(device: torch.device, size: int | None = None) -> int:
    """Return the stack that the context keeps for every thread the card can hold, bytes; set it first.

    At the usual 1,024 bytes it takes 264 MiB of an H200. Kernels whose frames the compiler knows, ours and
    the libraries', get what they need when they are loaded, whatever is set here.

    Args:
        device: With a CUDA context.
        size: Bytes a thread; None leaves it.
    """
    found = ctypes.c_size_t()
    with torch.cuda.device(device):
        torch.cuda.synchronize(device)
        if size is not None:
            _check(_cuda().cuCtxSetLimit(_STACK_SIZE, ctypes.c_size_t(size)), "stack size")
        _check(_cuda().cuCtxGetLimit(ctypes.byref(found), _STACK_SIZE), "stack size")
    return found.value


_collected: list[list[Source]] = []


@contextlib.contextmanager
def collecting() -> Iterator[list[Source]]:
    """Launch nothing inside; return what would have been launched."""
    sources: list[Source] = []
    _collected.append(sources)
    try:
        yield sources
    finally:
        _collected.pop()


def compile_ahead(sources: list[Source], device: torch.device) -> None:
    """Compile kernels side by side, into the cache."""
    index = torch.cuda.current_device() if device.index is None else device.index
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda source: compiled(source, architecture(index)), dict.fromkeys(sources)))


def packed(arguments: tuple[Argument, ...]) -> tuple[ctypes.Array[ctypes.c_void_p], list[object]]:
    """Return pointers to the arguments' values, as a launch takes them, and the values, to keep till then."""
    values: list[ctypes.c_void_p | ctypes.c_int | ctypes.c_float] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            values.append(ctypes.c_void_p(argument.data_ptr()))
        elif argument is None:
            values.append(ctypes.c_void_p(0))
        else:
            values.append(ctypes.c_int(argument) if isinstance(argument, int) else ctypes.c_float(argument))
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
    return pointers, list(values)


def launch(
    source: Source,
    grid: int,
    threads: int,
    shared_bytes: int,
    arguments: tuple[Argument, ...],
    *,
    early: bool,
) -> None:
    """Launch a kernel on the current stream.

    Args:
        source: Kernel and constants.
        grid: Blocks.
        threads: Of a block.
        shared_bytes: Of a block.
        arguments: In the kernel's order.
        early: It may start before the kernel ahead of it has ended; it waits inside for what it reads.

    Raises:
        RuntimeError: If the driver refuses; errors of the kernel itself come later, as CUDA's do.
    """
    if _collected:
        _collected[-1].append(source)
        return
    device = torch.cuda.current_device()
    function = _function(source, device, shared_bytes)
    attribute = _Attribute(_EARLY_LAUNCH, b"", 1, b"")
    configuration = _Configuration(
        grid,
        1,
        1,
        threads,
        1,
        1,
        shared_bytes,
        torch.cuda.current_stream(device).cuda_stream,
        ctypes.pointer(attribute),
        int(early),
    )
    pointers, _values = packed(arguments)
    _check(_cuda().cuLaunchKernelEx(ctypes.byref(configuration), function, pointers, None), source.name)
