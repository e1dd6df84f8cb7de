"""Where a card's memory goes while an engine starts and runs: each stage's growth, and what is left over."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

MIB = 2**20


def used_by_all() -> int:
    """Return the bytes of the card in use, as the driver sees them without a context of ours."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)
    except Exception:  # no NVML on this machine: one line less
        return 0


def readings() -> tuple[int, int, int]:
    """Return bytes of the card in use, held by the allocator, and allocated from it."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free, torch.cuda.memory_reserved(), torch.cuda.memory_allocated()


class Meter:
    """Reads the card's memory after each stage; does nothing where there is no card.

    Attributes:
        lines: Per stage what it added, MiB: allocated, held by the allocator and unused, outside of it.
    """

    def __init__(self) -> None:
        self.lines: dict[str, dict[str, float]] = {}
        self.is_on = torch.cuda.is_available()
        if self.is_on:
            before = used_by_all()
            torch.zeros(1, device="cuda")
            self._last = readings()
            self.before_mib = round(before / MIB)
            self.lines["context and first allocation"] = {"outside": round(self._outside() / MIB, 1)}

    def _outside(self) -> int:
        return self._last[0] - self._last[1]

    def note(self, stage: str) -> None:
        """Attribute what has come since the last reading to a stage; the same stage again adds up."""
        if not self.is_on:
            return
        used, reserved, allocated = self._last
        self._last = now = readings()
        grown = {
            "allocated": now[2] - allocated,
            "held unused": now[1] - now[2] - (reserved - allocated),
            "outside": now[0] - now[1] - (used - reserved),
        }
        line = self.lines.setdefault(stage, dict.fromkeys(grown, 0.0))
        for key, value in grown.items():
            line[key] = round(line.get(key, 0.0) + value / MIB, 1)

    def watch(self, owner: Any, name: str, before: str, after: str) -> None:
        """Read the memory before and after every call of a method from now on."""
        method = getattr(owner, name)

        @functools.wraps(method)
        def watched(*args: Any, **options: Any) -> Any:
            self.note(before)
            try:
                return method(*args, **options)
            finally:
                self.note(after)

        setattr(owner, name, watched)

    def watch_engine(self) -> None:
        """Watch everything that an engine on a GPU allocates or loads when it starts."""
        if not self.is_on:
            return
        from lean_laguna.engine.gpu_cache import PagedPools
        from lean_laguna.engine.gpu_graphs import Program
        from lean_laguna.engine.gpu_programs import StepPrograms
        from lean_laguna.engine.gpu_prompts import ChunkPrompts

        self.watch(PagedPools, "__init__", "weights", "pages")
        self.watch(StepPrograms, "__init__", "other parts of the engine", "weights joined, buffers of a step")
        self.watch(ChunkPrompts, "__init__", "other parts of the engine", "buffers of a prompt's chunk")
        self.watch(StepPrograms, "_compile", "other parts of the engine", "kernels compiled")
        run = Program.__call__

        def watched(program: Program) -> None:
            if program._graph is not None:
                return run(program)
            self.note("other parts of the engine")
            run(program)
            self.note("first runs: modules loaded" if program._graph is None else "graphs captured")
            return None

        Program.__call__ = watched  # type: ignore[method-assign]


def beyond(weights: Iterable[Tensor], kv_bytes: int) -> dict[str, Any]:
    """Return what is used beyond weights and pages, GiB, and the largest tensors of it, MiB."""
    storages = {w.untyped_storage().data_ptr(): w.untyped_storage().nbytes() for w in weights}
    used, reserved, allocated = readings()
    planned = sum(storages.values()) + kv_bytes
    stats = torch.cuda.memory_stats()
    gib = 2**30
    return {
        "weights_gib": round(sum(storages.values()) / gib, 2),
        "kv_gib": round(kv_bytes / gib, 2),
        "beyond_used_gib": round((used - planned) / gib, 2),
        "beyond_allocated_gib": round((allocated - planned) / gib, 2),
        "beyond_allocated_at_most_gib": round((torch.cuda.max_memory_allocated() - planned) / gib, 2),
        "held_unused_gib": round((reserved - allocated) / gib, 2),
        "of_it_in_pieces_gib": round(stats["inactive_split_bytes.all.current"] / gib, 2),
        "outside_the_allocator_gib": round((used - reserved) / gib, 2),
        "largest": _largest(storages, kv_bytes),
        "segments_with_room_mib": _pieces(),
        "triton_local_bytes": _local_bytes(),
    }


def _largest(known: dict[int, int], kv_bytes: int) -> dict[str, float]:
    """Return the largest tensors that are neither weights nor pages, with their sizes in MiB."""
    found: dict[int, tuple[int, str]] = {}
    for thing in gc.get_objects():
        if type(thing) in (Tensor, torch.nn.Parameter) and thing.is_cuda and thing.numel():
            storage = thing.untyped_storage()
            at, size = storage.data_ptr(), storage.nbytes()
            if at not in known and size < kv_bytes // 16:
                found[at] = (size, f"{list(thing.shape)} {thing.dtype}".replace("torch.", ""))
    top = sorted(found.values(), reverse=True)[:14]
    rest = sum(size for size, _ in found.values())
    return {"all": round(rest / MIB, 1)} | {
        f"{i} {told}": round(n / MIB, 1) for i, (n, told) in enumerate(top)
    }


def _pieces() -> list[tuple[float, float]]:
    """Return the allocator's segments with most unused in them: size and unused, MiB."""
    found = []
    for segment in torch.cuda.memory_snapshot():
        unused = segment["total_size"] - segment["allocated_size"]
        found.append((round(segment["total_size"] / MIB, 1), round(unused / MIB, 1)))
    return sorted(found, key=lambda pair: -pair[1])[:16]


def _local_bytes() -> dict[str, int]:
    """Return the Triton kernels with most local memory, bytes a thread: the driver sets it aside for all."""
    try:
        from triton.compiler import CompiledKernel

        found = {}
        for thing in gc.get_objects():
            if type(thing) is CompiledKernel and getattr(thing, "n_spills", None):
                found[thing.metadata.name] = max(found.get(thing.metadata.name, 0), int(thing.n_spills))
        return dict(sorted(found.items(), key=lambda item: -item[1])[:8])
    except Exception as error:  # another Triton keeps its kernels elsewhere
        return {repr(error)[:100]: 0}
