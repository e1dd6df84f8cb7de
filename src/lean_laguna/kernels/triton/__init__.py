"""Triton kernels of one decode or verify step of up to 16 rows, row by row the same bits whoever shares the step.

Their plain twins are in ``kernels.reference``. Nothing is imported here: without Triton the package still loads.
"""
