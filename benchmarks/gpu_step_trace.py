"""Where the steps of a GPU engine go: widths, lengths, times by kind, gaps on the device, host work."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from statistics import median
from typing import Any

from lean_laguna.engine.gpu_state import ENDED, STARTED, VERIFIED


class StepTrace:
    """Watches an engine from now on; ``take`` says what happened since the last call."""

    def __init__(self, engine: Any):
        self._engine = engine
        self._wrap(engine, "_read_round", self._read_round)
        self._wrap(engine, "_lay_out", self._count("layouts"))
        self._wrap(engine, "_decode", self._timed("decode_s"))
        self._wrap(engine._lanes, "wait_for", self._timed("wait_s"))
        self._wrap(engine._draft_lengths, "choose", self._timed("choose_s"))
        self._wrap(engine._draft_lengths, "observe", self._timed("observe_s"))
        self._wrap(engine._prices, "set", self._timed("prices_s"))
        self._last_end: Any = None
        self._clear()

    def take(self) -> dict[str, Any]:
        """Return totals, and per kind of step how many, and medians in milliseconds."""
        kinds = {}
        for (drafted, width, made), own in sorted(self._kinds.items(), key=lambda one: -len(one[1])):
            name = f"{drafted} drafts of {made}, {width} columns"
            kinds[name] = [len(own), *(round(1e3 * median(times), 3) for times in zip(*own, strict=True))]
        num = max(1, sum(len(own) for own in self._kinds.values()))
        gaps = [gap for own in self._kinds.values() for _, _, gap in own]
        found = {
            "launches": num,
            "wide": sum(len(own) for (_, width, _), own in self._kinds.items() if width > 8),
            "layouts": self._counts["layouts"],
            "gap_ms_a_launch": round(1e3 * sum(gaps) / num, 4),
            "host_us_a_launch": {
                name: round(1e6 * seconds / num, 1) for name, seconds in sorted(self._seconds.items())
            },
            "kinds: count, verify ms, draft ms, gap before it ms": dict(list(kinds.items())[:12]),
        }
        self._clear()
        return found

    def _clear(self) -> None:
        self._kinds: dict[Any, list[tuple[float, float, float]]] = defaultdict(list)
        self._seconds: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._last_end = None

    def _wrap(self, owner: Any, name: str, around: Any) -> None:
        inner = getattr(owner, name)
        setattr(owner, name, lambda *args, **rest: around(inner, *args, **rest))

    def _count(self, name: str) -> Any:
        def around(inner: Any, *args: Any, **rest: Any) -> Any:
            self._counts[name] += 1
            return inner(*args, **rest)

        return around

    def _timed(self, name: str) -> Any:
        def around(inner: Any, *args: Any, **rest: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*args, **rest)
            finally:
                self._seconds[name] += time.perf_counter() - start

        return around

    def _read_round(self, inner: Any, *args: Any, **rest: Any) -> Any:
        launched = self._engine._rounds[0].launched
        before = [sum(one.lane.drafted) for one in launched]
        result = inner(*args, **rest)
        for one, drafted in zip(launched, before, strict=True):
            stamps = [1e-9 * int(stamp) for stamp in one.said.arrays["stamps"]]
            verify_s, draft_s = one.verify_s, stamps[ENDED] - stamps[VERIFIED]
            gap_s = 0.0 if self._last_end is None else stamps[STARTED] - self._last_end
            self._last_end = stamps[ENDED]
            kind = (sum(one.lane.drafted) - drafted, one.cols, one.num_made_tokens)
            self._kinds[kind].append((verify_s, draft_s, gap_s))
        return result
