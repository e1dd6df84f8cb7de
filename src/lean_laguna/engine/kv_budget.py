"""How many KV blocks each group gets: exactly what the engine then allocates, block by block."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from lean_laguna.core.config import EngineConfig
from lean_laguna.core.errors import ConfigError
from lean_laguna.engine.block_table import quota_blocks
from lean_laguna.engine.scheduler import SchedulerLimits
from lean_laguna.models.kv_cache import KVGroup

Cache = TypeVar("Cache")

MEMINFO = Path("/proc/meminfo")
"""Of Linux."""
FREE_MEMORY_SHARE = 4
"""Without a given budget, KV takes at most 1 / this of the free memory; others need room too."""
FREE_GPU_MEMORY_SHARE = 0.75
"""On a GPU, which is ours, it takes so much of it; buffers need the rest."""
WINDOWED_CACHE_FACTOR = 2
"""Windowed pools are so many times what running sequences need, to keep ends of cached prompts too."""


@dataclass(frozen=True)
class KVBudget:
    """Blocks per group.

    Attributes:
        num_blocks: Per group, the null block included.
        block_bytes: Per group, bytes of one block over all its layers, keys and values.
        num_full_length_seqs: Sequences of the longest allowed length that fit at once.
    """

    num_blocks: tuple[int, ...]
    block_bytes: tuple[int, ...]
    num_full_length_seqs: int

    @property
    def total_bytes(self) -> int:
        """Bytes of all blocks."""
        return sum(n * size for n, size in zip(self.num_blocks, self.block_bytes, strict=True))


def stored_groups(groups: Sequence[KVGroup], kv_cache_dtype: str) -> tuple[KVGroup, ...]:
    """Return a target's KV groups as ``EngineConfig.kv_cache_dtype`` has them stored.

    A drafter's own pages stay in the type of its weights: they are few, and drafts are where errors show.
    """
    dtype = torch.float8_e4m3fn if kv_cache_dtype == "fp8" else None
    return tuple(dataclasses.replace(group, dtype=dtype) for group in groups)


def plan_kv_blocks(
    groups: Sequence[KVGroup],
    *,
    max_model_len: int,
    max_num_seqs: int,
    rows_per_step: int,
    kv_block_size: int,
    dtype: torch.dtype,
    enable_prefix_caching: bool,
    budget_bytes: int,
    is_budget_given: bool,
) -> KVBudget:
    """Give each group the blocks of as many full-length sequences as the budget holds.

    Args:
        groups: The KV groups.
        max_model_len: Longest prompt plus output, tokens.
        max_num_seqs: Sequences wanted at once; fewer full-length ones if the budget is short.
        rows_per_step: Most rows of one sequence in one pass.
        kv_block_size: Positions per block.
        dtype: Of keys and values of groups that name none.
        enable_prefix_caching: Also make room for cached ends of prompts.
        budget_bytes: Most bytes to use.
        is_budget_given: The budget is the user's: use all of it, for cached prompts too.

    Raises:
        ConfigError: Not one full-length sequence fits; names the longest length that does.
    """
    sizes = tuple(group.block_bytes(kv_block_size, dtype) for group in groups)
    factor = WINDOWED_CACHE_FACTOR if enable_prefix_caching else 1

    def blocks_per_sequence(length: int) -> list[int]:
        rows = min(rows_per_step, length)
        return [
            quota_blocks(length, rows, group.window, kv_block_size) * (1 if group.window is None else factor)
            for group in groups
        ]

    def bytes_for(length: int, num_seqs: int) -> int:
        blocks = blocks_per_sequence(length)
        return sum(size * (1 + n * num_seqs) for size, n in zip(sizes, blocks, strict=True))

    per_sequence = bytes_for(max_model_len, 2) - bytes_for(max_model_len, 1)
    null_blocks = sum(sizes)
    num_fitting = (budget_bytes - null_blocks) // per_sequence if per_sequence else max_num_seqs
    if num_fitting < 1:
        fits = bisect.bisect_right(
            range(1, max_model_len), budget_bytes, key=lambda length: bytes_for(length, 1)
        )
        raise ConfigError(
            f"max_model_len {max_model_len} needs {bytes_for(max_model_len, 1)} bytes of KV cache, "
            f"{budget_bytes} are available; "
            + (f"the largest max_model_len that fits is {fits}" if fits else "not even one token fits")
        )
    num_seqs = num_fitting if is_budget_given and enable_prefix_caching else min(num_fitting, max_num_seqs)
    num_blocks = tuple(
        1 + n * num_seqs if group.num_layers else 1
        for group, n in zip(groups, blocks_per_sequence(max_model_len), strict=True)
    )
    return KVBudget(num_blocks, sizes, num_seqs)


def kv_cache_for(
    groups: Sequence[KVGroup],
    config: EngineConfig,
    limits: SchedulerLimits,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    allocate: Callable[..., Cache],
) -> tuple[Cache, KVBudget]:
    """Plan and allocate the KV cache of an engine.

    Args:
        groups: The KV groups of target and drafter.
        config: Of the engine.
        limits: Of its scheduler.
        max_model_len: Longest prompt plus output, tokens.
        dtype: Of keys and values of groups that name none.
        device: Where they lie.
        allocate: ``models.kv_cache.KVCache``, or what takes the same arguments.

    Raises:
        ConfigError: Not one full-length sequence fits, or the memory asked for is not there.
    """
    given = config.kv_cache_memory_bytes
    free = free_memory_bytes(device)
    share = int(free * FREE_GPU_MEMORY_SHARE) if device.type == "cuda" else free // FREE_MEMORY_SHARE
    budget = plan_kv_blocks(
        groups,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        rows_per_step=limits.rows_per_step(max_model_len),
        kv_block_size=config.kv_block_size,
        dtype=dtype,
        enable_prefix_caching=config.enable_prefix_caching,
        budget_bytes=given if given is not None else share,
        is_budget_given=given is not None,
    )
    try:
        cache = allocate(groups, budget.num_blocks, config.kv_block_size, dtype, device)
    except (RuntimeError, TypeError) as error:  # out of memory, or more than a tensor can be
        raise ConfigError(
            f"the KV cache needs {budget.total_bytes} bytes, more than this machine can give; ask for less "
            f"with kv_cache_memory_bytes (free now: {free_memory_bytes(device)}): {error!s:.200}"
        ) from None
    return cache, budget


def free_memory_bytes(device: torch.device) -> int:
    """Return the bytes that can still be allocated on a device.

    On a CPU this is MemAvailable, which counts reclaimable page cache, capped by the control group's limit.
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = _meminfo_available()
    limit, used = _read_int("/sys/fs/cgroup/memory.max"), _read_int("/sys/fs/cgroup/memory.current")
    if limit is not None and used is not None:
        free = min(free, max(0, limit - used))
    return free


def _meminfo_available() -> int:
    try:
        for line in MEMINFO.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 4 << 30  # not Linux: a guess that a laptop holds


def _read_int(path: str) -> int | None:
    try:
        text = Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
