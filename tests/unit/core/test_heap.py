import gc
import weakref

import pytest

from lean_laguna.core import heap


class Loaded:
    """Something big that refers to itself."""

    def __init__(self):
        self.own = self


@pytest.fixture(autouse=True)
def _thaw():
    yield
    gc.unfreeze()


def test_what_is_loaded_is_not_searched_again():
    loaded = Loaded()
    heap.settle()
    assert gc.get_freeze_count() > 0
    assert all(found is not loaded for found in gc.get_objects())


def test_what_was_replaced_goes_at_the_next_call():
    loaded = Loaded()
    heap.settle()
    gone = weakref.ref(loaded)
    del loaded
    gc.collect()
    assert gone() is not None
    heap.settle()
    assert gone() is None
