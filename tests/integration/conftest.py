"""One server over the packaged pair for all tests that only ask it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.servers import RunningServer, nano, running


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    with running(nano()) as up:
        yield up
