"""What steps cost beside each other before any was timed: by rows, and by the launches that rows need."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from lean_laguna.spec.draft_schedule import ROW_TILES

# Of a one-row pass, what each further row adds, and each of its tile: 0.07 to 0.11 in all, CPU and H200.
_PER_ROW, _PER_TILED_ROW = 0.04, 0.04
_DRAFT, _DRAFT_PER_ROW = 0.3, 0.01  # a drafter's pass, and each row of it

# How far off it may be: for each row, up to four, in products of one size; in others; of plain steps.
_DOUBT_WITHIN, _FAR_WITHIN, _DOUBT, _DOUBT_OF_PLAIN = 0.015, 4, 0.15, 0.5


@dataclass(frozen=True)
class StepShape:
    """Times of steps in passes of one row; right in kind, and measured soon.

    Attributes:
        rows_per_launch: Rows that one launch takes, whole requests at a time; None for any number.
        row_tiles: Numbers of rows that products are made for, ascending; multiples of the last are, too.
    """

    rows_per_launch: int | None = None
    row_tiles: tuple[int, ...] = ROW_TILES

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
        draft = sum(_DRAFT + _DRAFT_PER_ROW * count for count in launches) if num_draft_tokens else 0.0
        return draft, sum(map(self._verifying, launches))

    @cache  # noqa: B019 - likewise
    def doubt(self, batch: int, length: int, other: int) -> float:
        """Return how far off the times of a length by another's may be, as a share."""
        if not length or not other:
            return _DOUBT_OF_PLAIN
        is_same = self._tiled(batch * (1 + length)) == self._tiled(batch * (1 + other))
        return _DOUBT_WITHIN * min(_FAR_WITHIN, abs(length - other)) if is_same else _DOUBT

    def _verifying(self, rows: int) -> float:
        return 1 + _PER_ROW * (rows - 1) + _PER_TILED_ROW * (self._tiled(rows) - 1)

    def _tiled(self, rows: int) -> int:
        last = self.row_tiles[-1]
        return next((tile for tile in self.row_tiles if tile >= rows), -(-rows // last) * last)
