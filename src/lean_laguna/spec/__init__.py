"""Draft and verify as algorithms: noise, sampling, acceptance, draft-length control, statistics, proposers.

Not here: networks (``models``), requests and scheduling (``engine``).
"""
