"""A drafter's linears as FP8, at load: a scale a row; the output stays the target's whatever it drafts."""

from __future__ import annotations

import torch

from lean_laguna.models.dflash import DFlashDrafter
from lean_laguna.quant import fp8
from lean_laguna.quant.packed import PackedWeight
from lean_laguna.quant.scheme import FP8_CHANNEL


def quantise_drafter(drafter: DFlashDrafter) -> None:
    """Round the layers' linears, and a Markov head's table of biases, to e4m3 with a scale a row, in place.

    Codes and scales go into ``packed_weights`` for kernels that read them; the parameters keep the values
    that these stand for, for all others.

    Args:
        drafter: With finite weights.
    """
    with torch.inference_mode(False), torch.no_grad():
        for name, parameter in drafter.named_parameters():
            is_linear = name.startswith("layers.") and parameter.ndim == 2
            if is_linear or name == "markov_w2":
                codes, scales = fp8.encode(parameter.detach().contiguous(), FP8_CHANNEL)
                packed = PackedWeight(FP8_CHANNEL, tuple(parameter.shape), codes, scales)
                packed.decode_into(parameter.detach())
                drafter.packed_weights[name] = packed
