"""Cards by name: how much memory they have and how fast it can be read.

Sources. Bandwidth: the vendors' data sheets. Memory: what the driver reports (NVML), which is not the figure
on the box: thundergolfer.com/blog/nvidia-gpu-memory-capacity for data-centre cards, public ``nvidia-smi``
listings for the others. Bandwidth that software has reached: H200, a read-only kernel measured for this
project; GB10, the frontier.fast report. GB10 and M5 share their memory with the system.
"""

from __future__ import annotations

from dataclasses import dataclass

from lean_laguna.core.errors import ConfigError, nearest

MIB, GIB = 2**20, 2**30
UNIFIED_SYSTEM_BYTES = 8 * GIB
"""Left to the system where card and system share memory: an idle DGX Spark holds 4 GiB, start-up peaks."""


@dataclass(frozen=True)
class Card:
    """A card.

    Attributes:
        name: As people write it.
        memory_bytes: What the driver reports, or what the system sees where the memory is shared.
        bandwidth: Bytes per second of the data sheet.
        reached: Bytes per second that a program has been measured to read, where known.
        is_unified: The system lives in the same memory.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    reached: float | None = None
    is_unified: bool = False

    @property
    def usable_bytes(self) -> int:
        """What a program may plan with."""
        return self.memory_bytes - (UNIFIED_SYSTEM_BYTES if self.is_unified else 0)


CARDS = {
    "b200": Card("NVIDIA B200", 183359 * MIB, 8.0e12),
    "h200": Card("NVIDIA H200", 143771 * MIB, 4.8e12, reached=4.57e12),
    "h100": Card("NVIDIA H100 SXM", 81559 * MIB, 3.35e12),
    "h100-nvl": Card("NVIDIA H100 NVL", 95830 * MIB, 3.938e12),
    "a100-80gb": Card("NVIDIA A100 80GB", 81920 * MIB, 2.039e12),
    "a100-40gb": Card("NVIDIA A100 40GB", 40960 * MIB, 1.555e12),
    "rtx-pro-6000": Card("RTX PRO 6000 Blackwell", 97887 * MIB, 1.792e12),
    "rtx-6000-ada": Card("RTX 6000 Ada", 49140 * MIB, 0.96e12),
    "l40s": Card("NVIDIA L40S", 46068 * MIB, 0.864e12),
    "rtx-5090": Card("RTX 5090", 32607 * MIB, 1.792e12),
    "rtx-4090": Card("RTX 4090", 24564 * MIB, 1.008e12),
    "rtx-3090": Card("RTX 3090", 24576 * MIB, 0.936e12),
    "l4": Card("NVIDIA L4", 23034 * MIB, 0.3e12),
    "gb10": Card("DGX Spark (GB10)", 119 * GIB, 0.273e12, reached=0.231e12, is_unified=True),
    "m5-max": Card("Apple M5 Max, 128 GB", 128 * GIB, 0.614e12, is_unified=True),
}
ALIASES = {"dgx-spark": "gb10", "spark": "gb10", "a100": "a100-80gb", "pro-6000": "rtx-pro-6000"} | {
    name: f"rtx-{name}" for name in ("5090", "4090", "3090")
}


def card(name: str) -> Card:
    """Return a card; spaces, underscores and case do not matter.

    Raises:
        ConfigError: No such card; names the nearest.
    """
    key = name.strip().lower().replace(" ", "-").replace("_", "-").removeprefix("nvidia-")
    key = ALIASES.get(key, key)
    if key not in CARDS:
        raise ConfigError(f"unknown card '{name}'{nearest(key, CARDS)}")
    return CARDS[key]
