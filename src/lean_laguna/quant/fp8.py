"""FP8: e4m3 codes with a scale per tensor, row, group or block; a weight is ``code * scale``.

Encoding follows compressed-tensors step by step, each in the weight's own dtype.

Source: compressed-tensors 0.20, quantization/utils/helpers.py, lifecycle/forward_helpers.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lean_laguna.quant.scaling import largest_by_tile, over, quotients
from lean_laguna.quant.scheme import WeightScheme
from lean_laguna.quant.scratch import Scratch

E4M3_MAX = 448.0


def encode(weight: Tensor, scheme: WeightScheme, scratch: Scratch | None = None) -> tuple[Tensor, Tensor]:
    """Quantise a weight [N, K], finite, contiguous.

    Returns:
        Codes [N, K] float8_e4m3fn; scales in the weight's dtype and the scheme's shape.
    """
    scratch = scratch or Scratch()
    scales = over(largest_by_tile(weight, scheme, scratch), E4M3_MAX)
    scales[scales == 0] = torch.finfo(scales.dtype).eps
    # Their zero point of 0 is added, which turns -0 into +0.
    values = quotients(weight, scales, scheme, scratch).add_(0.0)
    codes = values.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes, scales.reshape(scheme.scale_shape(*weight.shape))
