"""Triton kernels of one decode or verify step of up to 16 rows, each row with bits of its own.

Their plain twins are in ``kernels.reference``. Nothing is imported here: without Triton the package still
loads.
"""
