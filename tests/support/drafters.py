"""Small DFlash drafters in every format, their paged context, and a dense network to hold them against."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lean_laguna.core.drafter_config import DFlashConfig
from lean_laguna.core.model_config import LagunaConfig
from lean_laguna.models.dflash import DRAFT_FULL_GROUP, DFlashDrafter
from lean_laguna.models.drafter_checkpoint import make_drafter
from lean_laguna.models.forward_batch import ForwardBatch, SequenceSpan
from lean_laguna.models.kv_cache import KVCache, KVGroup

VOCAB, HIDDEN, TARGET_LAYERS, PAGE = 64, 32, 6, 4


def laguna_json(**changes: Any) -> dict[str, Any]:
    """Return a native config.json in Poolside's style: theta on top, no rope dict, no ``sliding_windows``."""
    return {
        "architectures": ["DFlashLagunaForCausalLM"],
        "model_type": "laguna",
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "layer_types": ["sliding_attention"] * 2,
        "sliding_window": 8,
        "gating": "per-head",
        "vocab_size": VOCAB,
        "draft_vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "num_target_layers": TARGET_LAYERS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
        "block_size": 6,
        "dflash_config": {"target_layer_ids": [1, 3, 5], "mask_token_id": 12, "causal": True},
    } | changes


def zlab_json(**changes: Any) -> dict[str, Any]:
    """Return a z-lab config.json: a Qwen3 config with ``dflash_config``."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "layer_types": ["full_attention"] * 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 256,
        "num_target_layers": TARGET_LAYERS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "block_size": 6,
        "dflash_config": {"target_layer_ids": [1, 3, 5], "mask_token_id": 12},
    } | changes


def speculators_json(network: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """Return a speculators config.json; ``network`` changes ``transformer_layer_config``."""
    own = ("architectures", "block_size", "num_target_layers", "dflash_config")
    layers = {key: value for key, value in zlab_json().items() if key not in own}
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "aux_hidden_state_layer_ids": [2, 4, 6],
        "block_size": 6,
        "draft_vocab_size": VOCAB,
        "mask_token_id": 12,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "transformer_layer_config": layers | dict(network or {}),
    } | changes


DSPARK = {
    "markov_rank": 4,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


def dspark_json(**changes: Any) -> dict[str, Any]:
    """Return a native DSpark config.json, its blocks laid out as DFlash's."""
    return laguna_json(architectures=["LagunaDSparkModel"], dspark_config=DSPARK) | changes


def deepspec_json(**changes: Any) -> dict[str, Any]:
    """Return a DeepSpec config.json: Qwen3 with the drafting keys on top."""
    given = zlab_json(architectures=["Qwen3DSparkModel"], block_size=5, num_anchors=8)
    return given | given.pop("dflash_config") | DSPARK | changes


def random_drafter(config: DFlashConfig | Mapping[str, Any], seed: int = 0) -> DFlashDrafter:
    """Return a drafter whose every weight matters: norms away from one, attention away from uniform."""
    if not isinstance(config, DFlashConfig):
        config = DFlashConfig.from_dict(config)
    drafter = make_drafter(config)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in drafter.named_parameters():
        is_norm = parameter.ndim == 1 or name == "aux_hidden_norms"
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.3 * noise if is_norm else noise * 1.5 / math.sqrt(parameter.shape[1])
        parameter.requires_grad_(False)
    return drafter.eval()


def random_rows(*shape: int, seed: int) -> Tensor:
    """Return standard normal float32 values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class PagedContext:
    """A drafter's paged context for several requests, its pages handed out in random order.

    ``forget_before`` drops pages as an engine does that keeps the window only.
    """

    def __init__(self, drafter: DFlashDrafter, num_requests: int, max_positions: int, *, fill: float = 0.0):
        pages = -(-max_positions // PAGE)
        empty = (KVGroup("full", 0, 1, 8, None), KVGroup("sliding", 0, 1, 8, 8))
        self.cache = KVCache(
            (*empty, *drafter.kv_groups()), (num_requests * pages + 1,) * 4, PAGE, drafter.norm.dtype, "cpu"
        )
        for i, group in enumerate(drafter.kv_groups()):
            for layer in range(group.num_layers):
                for tensor in self.cache.layer(DRAFT_FULL_GROUP + i, layer):
                    tensor[1:].fill_(fill)  # the null page stays zero
        order = random.Random(7).sample(range(1, num_requests * pages + 1), num_requests * pages)
        self.tables = [order[r * pages : (r + 1) * pages] for r in range(num_requests)]

    def forget_before(self, request: int, position: int) -> None:
        """Drop whole pages before ``position``."""
        for page in range(position // PAGE):
            self.tables[request][page] = 0

    def batch(self, rows: Mapping[int, tuple[int, int]], input_ids: Tensor | None = None) -> ForwardBatch:
        """Pack rows: request to (first position, number of rows)."""
        spans, start = [], 0
        for request, (first, count) in rows.items():
            spans.append(SequenceSpan(start, count, first, (tuple(self.tables[request]),) * 4))
            start += count
        positions = torch.cat([torch.arange(s.first_position, s.first_position + s.num_rows) for s in spans])
        ids = torch.zeros_like(positions) if input_ids is None else input_ids
        return ForwardBatch(ids, positions, tuple(spans), PAGE)


def dense_laguna(
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    taps: Tensor,
    block: Tensor,
    first_context: int = 0,
) -> Tensor:
    """Run a Laguna native drafter with whole attention matrices, from checkpoint names and raw JSON.

    Written from vLLM's laguna_dflash.py (context: norm per tap, fc, hidden_norm, then each layer's
    input_layernorm; block: pre-norm layers with a softplus gate), sharing no code with the package.

    Args:
        tensors: Native checkpoint.
        config: Its config.json.
        taps: [C, m, D], positions ``first_context`` to P - 1.
        block: [Q, D] embeddings at positions P, P + 1, ...
        first_context: Position of the first tap.
    """
    eps, head = config["rms_norm_eps"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    window = config["sliding_window"] if config["layer_types"][0] == "sliding_attention" else None
    causal = config["dflash_config"]["causal"]

    def rms(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * tensors[name]

    def rotate(x: Tensor, positions: list[int]) -> Tensor:
        half = head // 2
        angle = torch.tensor(
            [[p * config["rope_theta"] ** (-2 * i / head) for i in range(half)] for p in positions]
        )
        cos, sin = angle.cos()[:, None].to(x.dtype), angle.sin()[:, None].to(x.dtype)
        first, second = x[..., :half], x[..., half:]
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    num_context, num_rows = len(taps), len(block)
    first_block = first_context + num_context
    context_at = list(range(first_context, first_block))
    block_at = list(range(first_block, first_block + num_rows))
    visible = torch.tensor(
        [
            [k < first_block or not causal or k <= q for k in (*context_at, *block_at)]
            if window is None
            else [
                q - k < window and (k < first_block or (k <= q if causal else k - q < window))
                for k in (*context_at, *block_at)
            ]
            for q in block_at
        ]
    )
    normed = [rms(taps[:, j], f"aux_hidden_norms.{j}.weight") for j in range(taps.shape[1])]
    context = rms(torch.cat(normed, -1) @ tensors["fc.weight"].T, "hidden_norm.weight")
    hidden = block
    for i in range(config["num_hidden_layers"]):
        layer = f"layers.{i}."
        w_q, w_k, w_v = tensors[f"{layer}self_attn.qkv_proj.weight"].split(
            [heads * head, kv_heads * head, kv_heads * head]
        )
        a = rms(hidden, f"{layer}input_layernorm.weight")
        rows = torch.cat((rms(context, f"{layer}input_layernorm.weight"), a))
        q = rotate(rms((a @ w_q.T).view(-1, heads, head), f"{layer}self_attn.q_norm.weight"), block_at)
        k = rms((rows @ w_k.T).view(-1, kv_heads, head), f"{layer}self_attn.k_norm.weight")
        k = rotate(k, context_at + block_at).repeat_interleave(heads // kv_heads, 1)
        v = (rows @ w_v.T).view(-1, kv_heads, head).repeat_interleave(heads // kv_heads, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(head)
        out = torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -math.inf).softmax(-1), v)
        gate = a @ tensors[f"{layer}self_attn.g_proj.weight"].T
        out = out * torch.log1p(gate.exp()).view(num_rows, heads, -1)
        hidden = hidden + out.flatten(1) @ tensors[f"{layer}self_attn.o_proj.weight"].T
        m = rms(hidden, f"{layer}post_attention_layernorm.weight")
        gate, up = (m @ tensors[f"{layer}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        hidden = hidden + (gate * gate.sigmoid() * up) @ tensors[f"{layer}mlp.down_proj.weight"].T
    return rms(hidden, "norm.weight")


def tiny_target(**changes: int) -> LagunaConfig:
    """Return the config of a target that these drafters fit."""
    depth = changes.get("num_hidden_layers", TARGET_LAYERS)
    return LagunaConfig.from_dict(
        {
            "architectures": ["LagunaForCausalLM"],
            "model_type": "laguna",
            "hidden_size": HIDDEN,
            "num_hidden_layers": depth,
            "num_attention_heads": 4,
            "num_attention_heads_per_layer": [4] * depth,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 48,
            "layer_types": ["full_attention"] * depth,
            "mlp_layer_types": ["dense"] * depth,
            "sliding_window": 8,
            "vocab_size": VOCAB,
            "max_position_embeddings": 512,
            "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
            "gating": True,
        }
        | changes,
        "target config.json",
    )
