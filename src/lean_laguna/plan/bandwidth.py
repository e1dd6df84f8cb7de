"""How fast memory can be read: of this machine by measurement, of a card by name, or as given."""

from __future__ import annotations

import time
from dataclasses import dataclass

from lean_laguna.plan.cards import card

CPU_BYTES, GPU_BYTES = 1 << 28, 1 << 30
NUM_TRIES = 5


@dataclass(frozen=True)
class Bandwidth:
    """A bandwidth and where it comes from.

    Attributes:
        bytes_per_s: Bytes read per second.
        origin: For people: what was measured, or which card.
        reached: Bytes per second that a program is known to have read there, where that is known.
    """

    bytes_per_s: float
    origin: str
    reached: float | None = None


def bandwidth_of_card(name: str) -> Bandwidth:
    """Return the data sheet's bandwidth of a card.

    Raises:
        ConfigError: No such card.
    """
    found = card(name)
    return Bandwidth(found.bandwidth, f"{found.name}, data sheet", found.reached)


def measured_bandwidth() -> Bandwidth:
    """Measure how fast this machine reads memory: its first GPU, or the processor with torch's threads.

    The best of a few sums over a block far larger than any cache; read only, as weights are.
    """
    import torch

    if torch.cuda.is_available():
        block = torch.zeros(GPU_BYTES // 4, dtype=torch.float32, device="cuda")
        name = torch.cuda.get_device_name()
    else:
        block = torch.zeros(CPU_BYTES // 4, dtype=torch.float32)
        block.fill_(1.0)  # untouched pages would all be the one page of zeros
        threads = torch.get_num_threads()
        name = f"this processor, {threads} thread{'s' if threads > 1 else ''}"
    best = float("inf")
    for _ in range(NUM_TRIES):
        started = time.perf_counter()
        block.sum().item()
        best = min(best, time.perf_counter() - started)
    return Bandwidth(block.nbytes / best, f"{name}, measured now")
