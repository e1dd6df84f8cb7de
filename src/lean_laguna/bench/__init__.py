"""Measurements one can believe: A/B, draft-length sweep, parity, and their reports."""
