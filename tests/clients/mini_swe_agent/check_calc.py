"""The test that fails."""

import unittest

from calc import add


class Add(unittest.TestCase):
    """Of ``add``."""

    def test_adds(self):
        """It adds."""
        assert add(2, 3) == 5
