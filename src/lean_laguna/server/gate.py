"""Where new requests wait while the server is being changed."""

from __future__ import annotations

import asyncio


class Gate:
    """Open while nobody holds it; several may, and each lets go of its own hold only. For the event loop."""

    def __init__(self) -> None:
        self._holders: set[str] = set()
        self._is_open = asyncio.Event()
        self._is_open.set()

    @property
    def is_open(self) -> bool:
        """True while nobody holds it."""
        return not self._holders

    def hold(self, who: str) -> None:
        """Keep new requests back until ``who`` lets go."""
        self._holders.add(who)
        self._is_open.clear()

    def let_go(self, who: str) -> None:
        """End the hold of ``who``; nothing happens where it has none."""
        self._holders.discard(who)
        if not self._holders:
            self._is_open.set()

    def is_held_by(self, who: str) -> bool:
        """True while ``who`` has not let go."""
        return who in self._holders

    def let_all_in(self) -> None:
        """End every hold."""
        self._holders.clear()
        self._is_open.set()

    async def opened(self) -> None:
        """Wait until it is let open; by the waiter's turn somebody may hold it again."""
        await self._is_open.wait()
