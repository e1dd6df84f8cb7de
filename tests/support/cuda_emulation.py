"""Runs the CUDA C++ kernels on a CPU: compiled with g++ against ``cuda_emulator/emulator.h``."""

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

import torch

from lean_laguna.kernels.cuda import compiler, driver

WAITING = ("experts_up",)
"""Kernels whose programs wait for each other."""
HERE = Path(__file__).parent.parent / "cuda_emulator"


@functools.cache
def _library(source):
    folder = Path(tempfile.mkdtemp(prefix="cuda-emulator-"))
    unit = folder / "unit.cpp"
    constants = "".join(f"#define {key} {value}\n" for key, value in source.constants)
    if source.name in WAITING:
        constants += "#define ALL_AT_ONCE 1\n"
    text = f'#include "standard.h"\n{constants}#include "{source.name}.cu"\nEMULATE({source.name})\n'
    unit.write_text(text)
    command = ["g++", "-O1", "-std=c++20", "-shared", "-fPIC", "-w", "-DEMULATED"]
    command += [f"-I{HERE}", f"-I{compiler.FOLDER}", str(unit), "-o", str(folder / "unit.so")]
    subprocess.run(command, check=True, capture_output=True, text=True)
    library = ctypes.CDLL(str(folder / "unit.so"))
    library.emulate.restype = ctypes.c_char_p
    return library


def emulate(source, grid, threads, shared_bytes, arguments, settings):
    """Stand in for ``kernels.cuda.launching.launch_kernel``."""
    assert all(not isinstance(a, torch.Tensor) or a.device.type == "cpu" for a in arguments)
    pointers, values = driver.packed(arguments)
    failure = _library(source).emulate(grid, threads, shared_bytes, pointers)
    del values
    assert failure is None, f"{source.name}: {failure.decode()}"
