"""Whether a model fits: what each part takes, what is left, how far it goes, what would fit instead."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lean_laguna.core.errors import ConfigError
from lean_laguna.plan.cards import CARDS, MIB, UNIFIED_SYSTEM_BYTES
from lean_laguna.plan.engine_memory import EngineLimits, EngineMemory, bytes_by_group, loaded_bytes
from lean_laguna.plan.inventory import FLOATS, Inventory
from lean_laguna.plan.schemes import TITLES, stored_as
from lean_laguna.plan.subject import Drafter, Target
from lean_laguna.plan.vllm_memory import OVERHEAD_BYTES, UNIFIED_OVERHEAD_BYTES, VLLMMemory

SMALLER_SCHEMES = ("fp8", "int4", "nvfp4", "nvfp4-attention", "nvfp4-all")
"""What a model that does not fit could be stored as, the most faithful first."""


@dataclass(frozen=True)
class Room:
    """Memory to plan with.

    Attributes:
        total_bytes: All that may be planned with.
        origin: For people: which card, or what is free here.
        is_unified: The system lives in the same memory.
    """

    total_bytes: int
    origin: str
    is_unified: bool = False


@dataclass(frozen=True)
class Wish:
    """What shall fit.

    Attributes:
        context: Longest prompt plus output, tokens.
        num_streams: Requests at once, each of that length.
        limits: Our engine's settings.
        vllm_kv_bytes: Bytes of a key or value element in vLLM.
        max_num_batched_tokens: vLLM's rows per step.
    """

    context: int
    num_streams: int
    limits: EngineLimits
    vllm_kv_bytes: int = 2
    max_num_batched_tokens: int = 8192


def plan(target: Target, drafter: Drafter | None, room: Room, wish: Wish) -> dict[str, Any]:
    """Work out what a target, and maybe a drafter, take and whether they fit.

    Raises:
        ConfigError: The context is beyond the checkpoint's, or the drafter was not made for this target.
    """
    limit = target.config.max_position_embeddings
    if wish.context > limit:
        raise ConfigError(
            f"--context must be at most the model's max_position_embeddings, {limit}, found {wish.context}"
            + ("; see lean-laguna convert context --help" if limit == 262144 else "")
        )
    if drafter is not None:
        drafter.config.check_target(target.config, drafter.name)
    ours, theirs = _ours(target, drafter, room, wish), _theirs(target, drafter, room, wish)
    found = {
        "kind": "plan",
        "model": {"name": target.name, "known_from": target.known_from, "drafter": drafter and drafter.name},
        "room": dataclasses.asdict(room),
        "context": wish.context,
        "num_streams": wish.num_streams,
        "max_position_embeddings": limit,
        "engine": {
            **dataclasses.asdict(wish.limits),
            "prefill_chunk_size": wish.limits.chunk_size,
            "prefix_block_size": wish.limits.block_size,
        },
        "lean_laguna": ours,
        "vllm": theirs,
    }
    if not ours["fits"]:
        found["would_fit"] = _remedies(target, drafter, room, wish, ours)
    return found


def _ours(target: Target, drafter: Drafter | None, room: Room, wish: Wish) -> dict[str, Any]:
    limits = wish.limits
    memory = EngineMemory(target.config, drafter.config if drafter else None, limits)
    budget = memory.kv(wish.context, wish.num_streams)
    workspace = memory.workspace(wish.context, wish.num_streams)
    weights = loaded_bytes(target.inventory, limits)
    drafter_bytes = loaded_bytes(drafter.inventory, limits) if drafter else 0
    words = _scale_words(target.inventory, limits, room)
    workspace |= {"scales, as the kernels take them": words} if words else {}
    used = weights + drafter_bytes + sum(workspace.values()) + budget.total_bytes
    beside = room.total_bytes - weights - drafter_bytes - words
    return {
        "weights_bytes": weights,
        "drafter_bytes": drafter_bytes,
        "kv_bytes_by_layers": bytes_by_group(memory.groups, budget),
        "kv_cache_memory_bytes": budget.total_bytes,
        "num_blocks": list(budget.num_blocks),
        "workspace_bytes": sum(workspace.values()),
        "workspace": workspace,
        "used_bytes": used,
        "left_bytes": room.total_bytes - used,
        "fits": used <= room.total_bytes,
        "longest_context": memory.longest_context(wish.num_streams, beside),
        "most_streams": memory.most_streams(wish.context, beside),
        "flags": [
            f"--max-model-len {wish.context}",
            f"--max-num-seqs {wish.num_streams}",
            *([f"--max-num-batched-tokens {limits.prefill_chunk_size}"] if limits.prefill_chunk_size else []),
            f"--kv-cache-memory-bytes {budget.total_bytes}",
            *(["--kv-cache-dtype fp8"] if limits.kv_cache_dtype == "fp8" else []),
        ],
    }


_ROOMY = ("b200", "h200", "h100", "h100-nvl")


def _scale_words(inventory: Inventory, limits: EngineLimits, room: Room) -> int:
    """Return what scales of packed weights take once more.

    NVFP4's take two bytes each, others at most four for 64 columns of a row. Only the kernels of cards with
    much shared memory want them; one that is not known here is counted among these.
    """
    others = {card.name for name, card in CARDS.items() if name not in _ROOMY}
    if not limits.is_on_gpu or room.origin in others:
        return 0
    return sum(
        group.num_weights // (8 if group.number_format.startswith("NVFP4") else 16)
        for group in inventory.groups
        if group.number_format not in FLOATS
    )


def _theirs(target: Target, drafter: Drafter | None, room: Room, wish: Wish) -> dict[str, Any]:
    memory = VLLMMemory.of(
        target.config,
        drafter.config if drafter else None,
        element_bytes=wish.vllm_kv_bytes,
        max_num_batched_tokens=wish.max_num_batched_tokens,
    )
    weights = target.inventory.stored_bytes
    drafter_bytes = drafter.inventory.stored_bytes if drafter else 0
    overhead = UNIFIED_OVERHEAD_BYTES if room.is_unified else OVERHEAD_BYTES
    full, sliding = memory.blocks(wish.context)
    kv = memory.kv_bytes(wish.context, wish.num_streams)
    used = weights + drafter_bytes + overhead + kv
    for_kv = room.total_bytes - (used - kv)
    block = memory.page_bytes * memory.layers_per_group
    return {
        "weights_bytes": weights,
        "drafter_bytes": drafter_bytes,
        "kv_bytes_by_layers": {
            "full": full * wish.num_streams * block,
            "sliding": sliding * wish.num_streams * block,
        },
        "kv_cache_memory_bytes": kv,
        "workspace_bytes": overhead,
        "used_bytes": used,
        "left_bytes": room.total_bytes - used,
        "fits": used <= room.total_bytes,
        "longest_context": memory.longest_context(wish.num_streams, for_kv),
        "most_streams": memory.most_streams(wish.context, for_kv),
        "max_concurrency": memory.concurrency(wish.context, kv),
        "kv_element_bytes": wish.vllm_kv_bytes,
        "flags": memory.flags(wish.context, wish.num_streams),
    }


def _remedies(
    target: Target, drafter: Drafter | None, room: Room, wish: Wish, ours: dict[str, Any]
) -> list[dict[str, Any]]:
    """Return changes that would each make it fit, the gentlest first."""
    found: list[dict[str, Any]] = []

    def add(what: str, **details: Any) -> None:
        found.append({"what": what, **details})

    def fits(model: Target, with_drafter: Drafter | None, changed: Wish) -> bool:
        return bool(_ours(model, with_drafter, room, changed)["fits"])

    if ours["longest_context"]:
        add(
            f"a context of {ours['longest_context']:,} for {_streams(wish.num_streams)}",
            context=ours["longest_context"],
        )
    if ours["most_streams"]:
        add(f"{_streams(ours['most_streams'])} of {wish.context:,}", num_streams=ours["most_streams"])
    elif wish.num_streams > 1:
        one = _ours(target, drafter, room, dataclasses.replace(wish, num_streams=1))["longest_context"]
        if one > ours["longest_context"]:
            add(f"a context of {one:,} for 1 stream", context=one, num_streams=1)
    lean = dataclasses.replace(wish.limits, enable_prefix_caching=False)
    if wish.limits.enable_prefix_caching and fits(target, drafter, dataclasses.replace(wish, limits=lean)):
        add("no prefix caching", enable_prefix_caching=False)
    if drafter is not None and fits(target, None, wish):
        add("no drafter", drafter=None)
    weights = target.inventory.stored_bytes
    for scheme in SMALLER_SCHEMES:
        stored = dataclasses.replace(target, inventory=stored_as(target.config, scheme))
        if stored.inventory.stored_bytes < weights and fits(stored, drafter, wish):
            add(f"weights stored as {TITLES[scheme]}: lean-laguna convert quantize", scheme=scheme)
    needed = ours["used_bytes"]
    larger = sorted((c.usable_bytes, c.name) for c in CARDS.values() if c.usable_bytes >= needed)
    if larger:
        add(f"another card: {larger[0][1]}, {larger[0][0] / 2**30:.0f} GiB to use", card=larger[0][1])
    return found


def _streams(number: int) -> str:
    return f"{number} stream" + ("s" if number != 1 else "")


def cap_bytes(found: Mapping[str, Any]) -> int:
    """Return the memory limit of a control group that holds a plan: what is planned, and an eighth more.

    Where card and system have memories of their own, the limit is for the system's: the program, and pages of
    the checkpoint that the kernel may take back.

    Args:
        found: A plan that fits.
    """
    if not found["room"]["is_unified"] and found["engine"]["is_on_gpu"]:
        return 16 * 1024 * MIB
    used = found["lean_laguna"]["used_bytes"]
    wanted = used + max(used // 8, 2 * 1024 * MIB)
    return int(min(wanted, found["room"]["total_bytes"] + UNIFIED_SYSTEM_BYTES // 2))
