"""What steps cost beside each other before any like them was timed: by rows, and by their launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from lean_laguna.spec.draft_schedule import ROW_TILES

# Of a one-row pass, what each further row adds, and each of its tile: 0.07 to 0.11 in all, CPU and H200.
_PER_ROW, _PER_TILED_ROW = 0.04, 0.04
_DRAFT, _DRAFT_PER_ROW = 0.3, 0.01  # a drafter's pass, and each row of it

# How far off it may be: for each row, up to four, in products of one size; in others; of plain steps.
_DOUBT_WITHIN, _FAR_WITHIN, _DOUBT, _DOUBT_OF_PLAIN = 0.015, 4, 0.15, 0.5
_DOUBT_TIMED = 0.05  # likewise, where launches of so many rows were timed: with other tokens and contexts


@dataclass(frozen=True, eq=False)
class StepShape:
    """Times of steps, in passes of one row unless rows were timed; right in kind, and measured soon.

    Attributes:
        rows_per_launch: Rows that one launch takes, whole requests at a time; None for any number.
        row_tiles: Numbers of rows that products are made for, ascending; multiples of the last are, too.
        seconds: For each of these, seconds of verifying and of drafting by the rows of a launch; None where
            they were not timed.
    """

    rows_per_launch: int | None = None
    row_tiles: tuple[int, ...] = ROW_TILES
    seconds: tuple[Sequence[Sequence[float]], Sequence[Sequence[float]]] | None = None

    @cache  # noqa: B019 - of a handful of shapes
    def times(self, batch: int, num_draft_tokens: int) -> tuple[float, float]:
        """Return what drafting and verifying take.

        Args:
            batch: Sequences.
            num_draft_tokens: Of each.
        """
        rows = 1 + num_draft_tokens
        fitting = batch if self.rows_per_launch is None else max(1, self.rows_per_launch // rows)
        num_full, rest = divmod(batch, fitting)
        launches = [fitting * rows] * num_full + ([rest * rows] if rest else [])
        draft = sum(map(self._drafting, launches)) if num_draft_tokens else 0.0
        return draft, sum(map(self._verifying, launches))

    @cache  # noqa: B019 - likewise
    def doubt(self, batch: int, length: int, other: int) -> float:
        """Return how far off the times of a length by another's may be, as a share."""
        if not length or not other:
            return _DOUBT_OF_PLAIN
        if self._tiled(batch * (1 + length)) == self._tiled(batch * (1 + other)):
            return _DOUBT_WITHIN * min(_FAR_WITHIN, abs(length - other))
        return _DOUBT if self.seconds is None else _DOUBT_TIMED

    def _drafting(self, rows: int) -> float:
        if self.seconds is not None:
            return self._timed(self.seconds[1], rows)
        return _DRAFT + _DRAFT_PER_ROW * rows

    def _verifying(self, rows: int) -> float:
        if self.seconds is not None:
            return self._timed(self.seconds[0], rows)
        return 1 + _PER_ROW * (rows - 1) + _PER_TILED_ROW * (self._tiled(rows) - 1)

    def _timed(self, seconds: Sequence[Sequence[float]], rows: int) -> float:
        """Return what a launch takes; one of more rows than any was timed for, as many of the widest."""
        most = self.row_tiles[-1]
        width = next((i for i, tile in enumerate(self.row_tiles) if tile >= rows), -1)
        return seconds[width][min(rows, most)] * max(1.0, rows / most)

    def _tiled(self, rows: int) -> int:
        last = self.row_tiles[-1]
        return next((tile for tile in self.row_tiles if tile >= rows), -(-rows // last) * last)
