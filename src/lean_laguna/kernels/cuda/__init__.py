"""CUDA C++ kernels of a decode step for NVIDIA cards, where they measure faster than Triton's.

Compiled at first use by the compiler that PyTorch brings. ``kernels.triton`` stays the portable path.
"""
