"""Runs the CUDA C++ kernels on a CPU: compiled with g++ against ``cuda_emulator/emulator.h``."""

import ctypes
import functools
import hashlib
import subprocess
import tempfile
from pathlib import Path

import torch

from lean_laguna.kernels.cuda import compiler, driver

HERE = Path(__file__).parent.parent / "cuda_emulator"
KEPT = Path(__file__).parents[2] / "build" / "cuda-emulator"


@functools.cache
def _library(source):
    constants = "".join(f"#define {key} {value}\n" for key, value in source.constants)
    text = f'#include "standard.h"\n{constants}#include "{source.name}.cu"\nEMULATE({source.name})\n'
    kernel = (compiler.FOLDER / f"{source.name}.cu").read_text()
    options = ["-shared", *_includes()]
    made = _compiled(text, "c++", "kernel.so", *options, objects=[_runtime()], includes=kernel)
    library = ctypes.CDLL(str(made))
    library.emulate.restype = ctypes.c_char_p
    return library


@functools.cache
def _includes():
    """Return the folders of headers; that of the precompiled ones comes first."""
    precompiled = _compiled((HERE / "standard.h").read_text(), "c++-header", "standard.h.gch")
    return [f"-I{precompiled.parent}", f"-I{HERE}", f"-I{compiler.FOLDER}"]


@functools.cache
def _runtime():
    """Return the object that every kernel is linked with: to compile it took longer than most kernels do."""
    return _compiled((HERE / "runtime.cpp").read_text(), "c++", "runtime.o", "-c", *_includes())


def _compiled(text, language, name, *options, objects=(), includes=""):
    """Compile once, whichever process and run of the tests asks first.

    What it is made of names its folder: the text, what it includes, every header, and the compiler.
    """
    folder = KEPT / hashlib.sha256(f"{text}{includes}{options}{_headers()}".encode()).hexdigest()[:32]
    made = folder / name
    if not made.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as own:
            unit, output = Path(own) / "unit", Path(own) / "output"
            unit.write_text(text)
            command = ["g++", "-O1", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-w", "-DEMULATED"]
            command += [*options, "-x", language, str(unit), "-x", "none", *map(str, objects)]
            command += ["-o", str(output)]
            subprocess.run(command, check=True, capture_output=True, text=True)
            output.replace(made)
    return made


@functools.cache
def _headers():
    files = [*sorted(HERE.iterdir()), *sorted(compiler.FOLDER.glob("*.cuh"))]
    version = subprocess.run(["g++", "--version"], check=True, capture_output=True, text=True).stdout
    return hashlib.sha256("".join([version, *(file.read_text() for file in files)]).encode()).hexdigest()


late_inputs = []
"""Pairs of tensors: the first is filled from the second when the next kernel waits for its inputs."""


def emulate(source, grid, threads, shared_bytes, arguments, settings):
    """Stand in for ``kernels.cuda.launching.launch_kernel``."""
    assert all(not isinstance(a, torch.Tensor) or a.device.type == "cpu" for a in arguments)
    pointers, values = driver.packed(arguments)
    for to, values_then in late_inputs:
        size = ctypes.c_size_t(to.nbytes)
        _library(source).leave_inputs(
            ctypes.c_void_p(to.data_ptr()), ctypes.c_void_p(values_then.data_ptr()), size
        )
    late_inputs.clear()
    failure = _library(source).emulate(grid, threads, shared_bytes, pointers)
    del values
    assert failure is None, f"{source.name}: {failure.decode()}"
