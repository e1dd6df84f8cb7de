"""A chunk's context is what the drafter's own modules make of the taps, position by position."""

import copy

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; it comes with PyTorch's CUDA builds")

from tests.support.drafters import laguna_json, random_drafter, speculators_json, zlab_json

from lean_laguna.engine.gpu_weights import drafter_weights
from lean_laguna.kernels.triton.context import append_chunk_context, context_width, fold_tap

PAGE, BLOCKS, FIRST, TOKENS, ROWS = 4, 16, 5, 21, 32


@pytest.mark.parametrize("config", [laguna_json(), zlab_json(), speculators_json()])
def test_a_chunks_context_equals_the_modules(config, device, poisoned, count):
    drafter = copy.deepcopy(random_drafter(config)).to(device)
    weights = drafter_weights(drafter, 64)
    num_layers, J, P = len(weights.layers), drafter.config.num_key_value_heads, drafter.config.head_dim
    width, D = context_width(weights), drafter.norm.shape[0]
    cache = tuple(poisoned(num_layers, BLOCKS, PAGE, J, P, of=torch.float32) for _ in "kv")
    table = torch.randperm(BLOCKS - 1, device=device).int() + 1
    taps = torch.randn(ROWS, len(drafter.config.target_layer_ids), D, device=device)
    taps[TOKENS:] = float("nan")
    context = drafter.context_features(taps[:TOKENS].clone())
    at = torch.arange(FIRST, FIRST + TOKENS, device=device)
    cos, sin = (part.unsqueeze(-2) for part in drafter.rotary.compute(at))
    buffers = tuple(poisoned(ROWS, n, of=torch.float32) for n in (D, D, width))
    sums = torch.zeros(ROWS, D, device=device)
    for i in range(taps.shape[1]):
        room = poisoned(ROWS, D, of=torch.float32), poisoned(8, D, of=torch.float32)
        fold_tap(weights, i, taps[:, i].contiguous(), sums, count(TOKENS), room)
    append_chunk_context(weights, cache, sums, table, count(FIRST), count(TOKENS), buffers)
    slots = table[at // PAGE].long(), at % PAGE
    for i, layer in enumerate(drafter.layers):
        keys, values = layer.dense_context_kv(context, cos, sin)
        torch.testing.assert_close(cache[0][i][slots], keys, atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(cache[1][i][slots], values, atol=2e-5, rtol=2e-5)
    written = torch.zeros(BLOCKS, PAGE, dtype=torch.bool, device=device)
    written[slots] = True
    assert cache[0][:, ~written].isnan().all()
