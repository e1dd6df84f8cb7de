"""Tensors in, tensors out: plain PyTorch, its Triton twins, and the choice between them."""
