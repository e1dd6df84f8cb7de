"""A module with a mistake."""


def add(a, b):
    """Return the sum."""
    return a - b
