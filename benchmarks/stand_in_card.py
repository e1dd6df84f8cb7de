"""A card that is not there: an engine is made for it, and what it would launch is noted, not computed.

Tensors "on the card" have shapes and types only. What engine and kernels ask a device, its capability, shared
memory and multiprocessors, is answered from ``Card``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from lean_laguna.core.config import EngineConfig
from lean_laguna.core.drafter_config import DFlashConfig
from lean_laguna.core.engine_sizes import NARROW
from lean_laguna.core.model_config import LagunaConfig
from lean_laguna.core.rope_config import RopeConfig
from lean_laguna.engine import gpu_engine, gpu_packed, gpu_programs, gpu_weights
from lean_laguna.engine.gpu_engine import GpuEngine
from lean_laguna.engine.gpu_programs import StepPrograms
from lean_laguna.engine.gpu_prompts import ChunkPrompts
from lean_laguna.kernels.cuda import driver, launching
from lean_laguna.kernels.cuda.compiler import Source
from lean_laguna.kernels.triton.launch import shared_memory
from lean_laguna.models import dummy
from lean_laguna.models.dummy import (
    drafter_config,
    dummy_drafter,
    dummy_target,
    dummy_tokenizer,
    target_config,
)
from lean_laguna.spec.dspark_proposer import make_proposer

CUDA, META = torch.device("cuda", 0), torch.device("meta")
LAYERS = 7
"""Of a target here: every kind of layer is among the first so many."""
_ADDRESS = 1 << 20
_KIB = 1024


@dataclass(frozen=True)
class Card:
    """What kernels ask about a device.

    Attributes:
        capability: Compute capability.
        shared_bytes: Shared memory that a program may have.
        multiprocessors: Of the card named.
        name: A card of this kind.
    """

    capability: tuple[int, int]
    shared_bytes: int
    multiprocessors: int
    name: str

    @property
    def architecture(self) -> int:
        """Return 90 for sm_90."""
        return 10 * self.capability[0] + self.capability[1]


CARDS = {
    card.architecture: card
    for card in (
        Card((8, 0), 163 * _KIB, 108, "A100"),
        Card((8, 6), 99 * _KIB, 82, "RTX 3090"),
        Card((8, 7), 163 * _KIB, 16, "Jetson AGX Orin"),
        Card((8, 9), 99 * _KIB, 128, "RTX 4090, L40S"),
        Card((9, 0), 227 * _KIB, 132, "H100, H200"),
        Card((10, 0), 227 * _KIB, 148, "B200"),
        Card((10, 3), 227 * _KIB, 148, "B300"),
        Card((11, 0), 227 * _KIB, 20, "Jetson AGX Thor"),
        Card((12, 0), 99 * _KIB, 170, "RTX 5090, RTX PRO 6000"),
        Card((12, 1), 99 * _KIB, 48, "GB10 (DGX Spark)"),
    )
}
"""By architecture. Source: CUDA C++ Programming Guide, table of compute capabilities; maker's data sheets."""


@dataclass(frozen=True)
class TritonLaunch:
    """A Triton kernel as it is compiled for one launch."""

    kernel: Any
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: Any

    @property
    def name(self) -> str:
        """Module and function."""
        return f"{self.kernel.fn.__module__.rpartition('.')[2]}.{self.kernel.fn.__name__.strip('_')}"

    @property
    def what(self) -> str:
        """Types and constants in text."""
        types = [str(kind) for kind in self.signature.values() if kind != "constexpr"]
        own = [
            f"{self.kernel.arg_names[at[0]]}={value}" for at, value in self.constants.items() if len(at) == 1
        ]
        return " ".join(types + own)


@dataclass(frozen=True)
class CudaLaunch:
    """A CUDA C++ kernel, and what a launch asks for."""

    source: Source
    threads: int
    shared_bytes: int

    @property
    def name(self) -> str:
        """Of its file."""
        return f"{self.source.name}.cu"

    @property
    def what(self) -> str:
        """Constants in text."""
        return " ".join(f"{name}={value}" for name, value in self.source.constants)


Launched = TritonLaunch | CudaLaunch


@dataclass
class Noted:
    """Every different launch of an engine, in order.

    Attributes:
        launches: By what sets them apart.
        kernels: What the engine says that computes its steps.
        most_rows: Rows that one launch of a step takes.
    """

    launches: dict[tuple[str, ...], Launched] = field(default_factory=dict)
    kernels: str = ""
    most_rows: int = 0

    def note_triton(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        """Stand in for ``JITFunction.run``."""
        *_, backend, bind = kernel.device_caches[triton.runtime.driver.active.get_current_device()]
        options = {
            name: value for name, value in (_ASKED | options).items() if name in _known(kernel, backend)
        }
        bound, specialisation, parsed = bind(*args, **options)
        key = (kernel.fn.__module__, kernel.fn.__name__, str(specialisation), str(parsed))
        if key not in self.launches:
            found = kernel._pack_args(backend, options, bound, specialisation, parsed)
            parsed, signature, constants, attributes = found
            self.launches[key] = TritonLaunch(kernel, signature, constants, attributes, parsed)

    def note_cuda(
        self, source: Source, grid: int, threads: int, shared_bytes: int, arguments: Any, *, early: bool
    ) -> None:
        """Stand in for ``kernels.cuda.driver.launch``."""
        launch = CudaLaunch(source, threads, shared_bytes)
        self.launches.setdefault((source.name, str(launch)), launch)


_ASKED = {"debug": False, "instrumentation_mode": "", "fpsan_homomorphic_casts": False}
"""What ``JITFunction.run`` adds to a launch's options, in the versions of Triton that have them."""


@functools.cache
def _known(kernel: Any, backend: Any) -> frozenset[str]:
    """Return the options that a launch of a kernel may have."""
    return frozenset(f.name for f in dataclasses.fields(backend.parse_options({}))) | set(kernel.arg_names)


class _OnCard(TorchFunctionMode):
    """Has tensors without storage say that they are on the card, and makes those asked for there so."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        attribute = getattr(func, "__self__", None)
        if attribute is torch.Tensor.device:
            found = func(*args)
            return CUDA if found.type == "meta" else found
        if attribute is torch.Tensor.is_cuda:
            return args[0].device.type == "cuda"
        if func is torch.Tensor.data_ptr:
            return _ADDRESS + args[0].storage_offset() * args[0].element_size()
        if func in (torch.Tensor.normal_, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.equal:
            return True
        if func is torch.Tensor.__float__:
            return 1.0
        given = {name: _placed(value) for name, value in (kwargs or {}).items()}
        given.pop("pin_memory", None)
        given.pop("generator", None)
        if func is torch.randint:
            return torch.empty(*args[2], **given)
        if func is torch.arange and given.get("device") == META:  # or torch would load its compiler
            return torch.empty(len(range(*args)), **{"dtype": torch.int64} | given)
        return func(*map(_placed, args), **given)


def _placed(value: Any) -> Any:
    return META if isinstance(value, torch.device) and value.type == "cuda" else value


class _Generator(torch.Generator):
    """Draws nothing, on the card."""

    device = CUDA

    def manual_seed(self, seed: int) -> _Generator:
        return self


class _Torch:
    """``torch`` with generators of the card."""

    @staticmethod
    def Generator(*_: Any) -> _Generator:  # noqa: N802
        return _Generator()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Driver:
    """What Triton and the CUDA C++ kernels' driver ask."""

    def __init__(self, card: Card):
        self.card = card
        self.utils = SimpleNamespace(get_device_properties=self._properties)

    def _properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": self.card.shared_bytes, "multiprocessor_count": self.card.multiprocessors}

    def get_current_device(self) -> int:
        return self.card.architecture

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.card.architecture, 32)

    def get_active_torch_device(self) -> torch.device:
        return CUDA

    def cuDeviceGetAttribute(self, found: Any, *_: int) -> int:  # noqa: N802
        found._obj.value = self.card.shared_bytes
        return 0


@contextlib.contextmanager
def stands_in(card: Card) -> Iterator[Noted]:
    """Have ``card`` be the device inside; return what is launched there."""
    noted, own = Noted(), _Driver(card)
    properties = SimpleNamespace(multi_processor_count=card.multiprocessors)
    asked: dict[str, Any] = {
        "get_device_capability": card.capability,
        "get_device_properties": properties,
        "current_device": 0,
        "mem_get_info": (256 << 30, 256 << 30),
        "graph_pool_handle": None,
        "synchronize": None,
        "empty_cache": None,
    }
    places: list[tuple[Any, str, Any]] = [
        *((torch.cuda, name, functools.partial(_answer, value)) for name, value in asked.items()),
        (dummy, "torch", _Torch()),
        (driver, "_cuda", lambda: own),
        (launching, "launch", noted.note_cuda),
        (JITFunction, "run", lambda kernel, *args, **options: noted.note_triton(kernel, *args, **options)),
        (gpu_engine, "drop_stack", functools.partial(_answer, None)),
        (gpu_engine, "why_not_cuda", lambda weight: None if weight.dtype == torch.bfloat16 else "float32"),
        (gpu_engine, "measure_rows", lambda p: [[1.0] * (p.most_rows + 1) for _ in p.widths]),
        (gpu_weights, "_rotary", _rotary),
        (gpu_packed, "reordered", lambda codes, *_: codes),
        (gpu_packed, "restored", lambda codes, *_: codes),
        (gpu_programs, "compile_ahead", lambda runs: [run() for run in runs]),
        (StepPrograms, "warm_up", _warm_up),
        (ChunkPrompts, "capture", _capture),
    ]
    before = triton.runtime.driver.active if torch.cuda.is_available() else None
    with contextlib.ExitStack() as stack:
        for place in places:
            stack.enter_context(patch.object(*place))
        triton.runtime.driver.set_active(own)
        _forget()
        try:
            with _OnCard(), torch.no_grad():
                yield noted
        finally:
            _forget()
            if before is not None:
                triton.runtime.driver.set_active(before)


def _answer(value: Any, *_: Any, **__: Any) -> Any:
    return value


def _forget() -> None:
    """Let go of what functions remember of the device."""
    for name in ("architecture", "multiprocessors", "shared_memory", "has_bulk_copies"):
        getattr(driver, name).cache_clear()
    shared_memory.cache_clear()


def _rotary(rope: RopeConfig, head_dim: int, num: int, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return tables of no contents: to compute them torch would load its compiler."""
    sizes = num, rope.rotary_dim(head_dim) // 2
    return torch.empty(sizes, dtype=like.dtype, device=CUDA), torch.empty(
        sizes, dtype=like.dtype, device=CUDA
    )


def _warm_up(programs: StepPrograms, others: Sequence[Callable[[], object]] = ()) -> None:
    """Launch what is compiled ahead, and wide programs that filter, which are not."""
    programs._compile(others)
    for name, cols in programs._usual():
        if cols > NARROW:
            programs._body(name, cols, True)


def _capture(prompts: ChunkPrompts) -> None:
    """Do what ``capture`` does where nothing can be captured."""
    if not prompts._programs.uses_cuda:
        prompts._step.attend_block = None


def short_target(config: LagunaConfig) -> LagunaConfig:
    """Return a target of ``LAYERS`` layers."""
    own = slice(0, LAYERS)
    return dataclasses.replace(
        config,
        num_hidden_layers=LAYERS,
        num_attention_heads_per_layer=config.num_attention_heads_per_layer[own],
        layer_types=config.layer_types[own],
        mlp_layer_types=config.mlp_layer_types[own],
        gating=config.gating[own],
    )


def short_drafter(config: DFlashConfig) -> DFlashConfig:
    """Return its drafter, which reads as many layers as before."""
    taps = tuple(range(1, 1 + len(config.target_layer_ids)))
    return dataclasses.replace(config, target_layer_ids=taps, num_target_layers=LAYERS)


def launches_of(
    card: Card,
    shape: str,
    *,
    drafter: str | None,
    scheme: str,
    kv_cache_dtype: str,
    kernels: str,
    max_model_len: int = 131072,
) -> Noted:
    """Make an engine of random weights for a card, eight requests at once, and return what it launches.

    Args:
        card: That stands in.
        shape: Of the target, as ``--shape`` names it.
        drafter: ``dummy``, ``dummy-dspark`` or None.
        scheme: As ``--scheme``.
        kv_cache_dtype: As ``--kv-cache-dtype``.
        kernels: As ``--kernels``.
        max_model_len: Longest prompt plus output, tokens.

    Raises:
        ConfigError: The engine refuses.
    """
    config = EngineConfig(
        model=shape,
        kernels=kernels,  # type: ignore[arg-type]
        kv_cache_memory_bytes=64 << 30,
        max_model_len=max_model_len,
        max_num_seqs=8,
        kv_cache_dtype=kv_cache_dtype,  # type: ignore[arg-type]
        enable_prefix_caching=True,
    )
    with stands_in(card) as noted:
        target = dummy_target(short_target(target_config(shape)), torch.bfloat16, CUDA, scheme=scheme)
        proposer = None
        if drafter is not None:
            own = dummy_drafter(short_drafter(drafter_config(drafter, shape)), torch.bfloat16, CUDA)
            proposer = make_proposer(own, target)
        drafts = 7 if drafter is not None else None
        engine = GpuEngine(target, dummy_tokenizer(64), proposer, config, num_speculative_tokens=drafts)
        noted.kernels, noted.most_rows = engine.kernels, engine.programs.most_rows
    return noted
