"""Compiles the CUDA C++ kernels beside this file for the card at hand, with PyTorch's own compiler.

NVRTC is called through ctypes: no CUDA toolkit is needed. Machine code is kept in the user's cache folder,
keyed by source, options and compiler version.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
HEADERS = (
    "attention.cuh",
    "common.cuh",
    "packed.cuh",
    "packed_words.cuh",
    "routing.cuh",
    "table.cuh",
    "units.cuh",
    "warpgroups.cuh",
    "wide.cuh",
)
WITH_WARPGROUPS = ("prompt_attention",)
"""Kernels whose instructions one architecture has and no later one."""


class CompilationError(RuntimeError):
    """A kernel did not compile, or there is no compiler."""


@dataclass(frozen=True)
class Source:
    """A kernel and the constants it is compiled with.

    Attributes:
        name: Of the file without its ending, and of the kernel in it.
        constants: Passed as ``-Dname=value``.
    """

    name: str
    constants: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, name: str, **constants: int) -> Source:
        """Return a kernel with named constants."""
        return cls(name, tuple(sorted((key, int(value)) for key, value in constants.items())))

    def options(self, architecture: str) -> list[str]:
        """Return the compiler's options for an architecture such as ``sm_90``."""
        own = "a" if self.name in WITH_WARPGROUPS else ""
        return [
            f"--gpu-architecture={architecture}{own}",
            "--std=c++17",
            *(f"-D{k}={v}" for k, v in self.constants),
        ]


def _candidates() -> Iterator[str]:
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or [] if spec is not None else []:
        yield from sorted(map(str, Path(folder).glob("*/lib/libnvrtc.so.*")), reverse=True)
    for root in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if root:
            yield from sorted(map(str, Path(root).glob("lib64/libnvrtc.so*")), reverse=True)
    yield from ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")


@functools.cache
def nvrtc() -> ctypes.CDLL:
    """Load the compiler.

    Raises:
        CompilationError: If there is none.
    """
    for name in _candidates():
        if "alt" in name:
            continue
        try:
            # NVRTC opens its builtins by name alone: have them open already.
            for builtins in Path(name).parent.glob("libnvrtc-builtins.so.*") if "/" in name else ():
                ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise CompilationError(
        "no libnvrtc found: PyTorch's CUDA builds bring it (pip install nvidia-cuda-nvrtc)"
    )


def has_nvrtc() -> bool:
    """Say whether CUDA C++ can be compiled here."""
    try:
        nvrtc()
    except CompilationError:
        return False
    return True


def _version() -> str:
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "lean-laguna" / "cubin"


def compiled(source: Source, architecture: str) -> bytes:
    """Return a kernel's machine code, from the cache or from the compiler.

    Args:
        source: Kernel and constants.
        architecture: ``sm_90``, say.

    Raises:
        CompilationError: With the compiler's words.
    """
    texts = [(FOLDER / f"{source.name}.cu").read_bytes(), *((FOLDER / h).read_bytes() for h in HEADERS)]
    options = source.options(architecture)
    key = hashlib.sha256(
        b"\0".join([*texts, *(o.encode() for o in options), _version().encode()])
    ).hexdigest()
    path = _cache_folder() / f"{key}.cubin"
    if path.is_file():
        return path.read_bytes()
    code = _compile(source.name, texts, options)
    _keep(path, code)
    return code


def _keep(path: Path, code: bytes) -> None:
    """Write to the cache whole or not at all; a folder that cannot be written only costs time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code)
        os.replace(file.name, path)
    except OSError:
        return


def _compile(name: str, texts: list[bytes], options: list[str]) -> bytes:
    library, program = nvrtc(), ctypes.c_void_p()
    strings = ctypes.c_char_p * len(HEADERS)
    library.nvrtcCreateProgram(
        ctypes.byref(program),
        texts[0],
        f"{name}.cu".encode(),
        len(HEADERS),
        strings(*texts[1:]),
        strings(*(h.encode() for h in HEADERS)),
    )
    flags = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
    try:
        if library.nvrtcCompileProgram(program, len(options), flags):
            raise CompilationError(f"{name}.cu with {' '.join(options)}:\n{_log(library, program)}")
        size = ctypes.c_size_t()
        library.nvrtcGetCUBINSize(program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        library.nvrtcGetCUBIN(program, code)
        return code.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _log(library: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, text)
    return text.value.decode(errors="replace")
