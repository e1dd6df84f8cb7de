"""Where a step's rows stand, on the device: what every kernel reads and only the end of a step changes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """The rows of a step, on the device: which request each belongs to and where it stands.

    A request's rows are consecutive, at consecutive positions.

    Attributes:
        num_rows: [1] int32, live rows, at most MAX_ROWS.
        num_requests: [1] int32, entries of ``row_start`` and ``row_count`` that count; a count may be 0.
        row_start: [MAX_ROWS] int32 first row of each request.
        row_count: [MAX_ROWS] int32 rows of each request.
        row_request: [MAX_ROWS] int32 request of each row.
        positions: [MAX_ROWS] int32 absolute position of each row.
    """

    num_rows: Tensor
    num_requests: Tensor
    row_start: Tensor
    row_count: Tensor
    row_request: Tensor
    positions: Tensor
