"""Random Laguna targets of any shape, and runs of them through the paged cache in any partition."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from lean_laguna.core.model_config import LagunaConfig
from lean_laguna.models.forward_batch import ForwardBatch, SequenceSpan
from lean_laguna.models.kv_cache import KVCache
from lean_laguna.models.laguna import LagunaForCausalLM

VOCAB, PAGE = 64, 4
FULL, SLIDING = "full_attention", "sliding_attention"


def laguna_json(**changes: Any) -> dict[str, Any]:
    """Return a small config.json with every feature; None removes a key."""
    given = {
        "architectures": ["LagunaForCausalLM"],
        "model_type": "laguna",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_attention_heads_per_layer": [4, 6, 6, 4],
        "num_key_value_heads": 2,
        "head_dim": 8,
        "layer_types": [FULL, SLIDING, SLIDING, FULL],
        "sliding_window": 8,
        "intermediate_size": 48,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "moe_routed_scaling_factor": 2.5,
        "gating": True,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256,
        "rope_parameters": {
            FULL: {
                "rope_type": "yarn",
                "rope_theta": 500000.0,
                "partial_rotary_factor": 0.5,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
            },
            SLIDING: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        },
        "eos_token_id": 2,
    } | changes
    return {key: value for key, value in given.items() if value is not None}


def random_json(seed: int) -> dict[str, Any]:
    """Draw a config: mixes of layers and heads, gates, rotations, experts, softcaps."""
    draw = random.Random(seed)
    layers = draw.randint(2, 4)
    kv_heads, head_dim = draw.choice([1, 2]), draw.choice([8, 16])
    kinds = [draw.choice([FULL, SLIDING]) for _ in range(layers)]
    yarn = {
        "rope_type": "yarn",
        "rope_theta": draw.choice([10000.0, 500000.0]),
        "partial_rotary_factor": draw.choice([0.5, 1.0]),
        "factor": draw.choice([4.0, 32.0]),
        "original_max_position_embeddings": draw.choice([16, 64]),
        "beta_fast": draw.choice([32.0, 64.0]),
        "beta_slow": 1.0,
    }
    if draw.random() < 0.5:
        yarn["attention_factor"] = draw.choice([0.9, 1.0 + 2**-4, 1.3465735902799727])
    plain = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": draw.choice([0.5, 1.0])}
    experts = draw.choice([4, 8, 20])
    return laguna_json(
        hidden_size=draw.choice([32, 48]),
        num_hidden_layers=layers,
        num_attention_heads=None,
        num_attention_heads_per_layer=[kv_heads * draw.choice([1, 2, 3]) for _ in range(layers)],
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        layer_types=kinds,
        sliding_window=draw.choice([5, 8, 17]),
        mlp_layer_types=[draw.choice(["dense", "sparse", "sparse"]) for _ in range(layers - 1)] + ["sparse"],
        num_experts=experts,
        num_experts_per_tok=draw.choice([1, 2, 3]),
        moe_intermediate_size=draw.choice([8, 24]),
        shared_expert_intermediate_size=draw.choice([8, 24]),
        moe_routed_scaling_factor=draw.choice([1.0, 2.5]),
        moe_router_logit_softcapping=draw.choice([0.0, 0.0, 0.5]),
        gating=draw.choice([True, "per-head", "per-element"]),
        tie_word_embeddings=draw.random() < 0.25,
        rope_parameters={FULL: draw.choice([yarn, yarn, plain]), SLIDING: plain},
    )


def random_target(config: LagunaConfig, seed: int = 0, std: float = 0.15) -> LagunaForCausalLM:
    """Return a target with random weights, norms and correction biases among them."""
    generator = torch.Generator().manual_seed(seed)
    target = LagunaForCausalLM(config)
    target.reset_parameters(std, generator)
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5, generator=generator)
            if name.endswith("e_score_correction_bias"):
                parameter.normal_(0.0, 0.2, generator=generator)
    return target.eval().requires_grad_(False)


def random_ids(length: int, seed: int = 0, vocab: int = VOCAB) -> torch.Tensor:
    """Return random token ids [length]."""
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed))


def random_partition(length: int, seed: int, largest: int = 40) -> list[int]:
    """Cut ``length`` into random parts."""
    draw = random.Random(seed)
    parts: list[int] = []
    while (left := length - sum(parts)) > 0:
        parts.append(min(left, draw.randint(1, largest)))
    return parts


class PagedRun:
    """Several sequences in one cache, their pages shuffled and, at first, full of NaN."""

    def __init__(self, target: LagunaForCausalLM, lengths: Sequence[int], seed: int = 0, page: int = PAGE):
        self.target, self.page = target, page
        needed = [-(-length // page) for length in lengths]
        num_blocks = sum(needed) + 1
        groups = target.kv_groups()
        dtype = target.model.embed_tokens.weight.dtype
        self.cache = KVCache(groups, [num_blocks] * len(groups), page, dtype)
        for group, layout in enumerate(groups):
            for layer in range(layout.num_layers):
                self.cache.storage(group, layer)[1:] = float("nan")
        order = [list(range(1, num_blocks)) for _ in groups]
        for group, blocks in enumerate(order):
            random.Random(seed + group).shuffle(blocks)
        self.tables = []
        for count in needed:
            self.tables.append(tuple(tuple(blocks.pop() for _ in range(count)) for blocks in order))
        self.done = [0] * len(lengths)

    def step(
        self, parts: Sequence[tuple[int, torch.Tensor]], tap_layer_ids: tuple[int, ...] = ()
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Run (sequence, ids) pairs in one batch; return logits and taps of each."""
        spans, positions, start = [], [], 0
        for sequence, ids in parts:
            first = self.done[sequence]
            spans.append(SequenceSpan(start, len(ids), first, self.tables[sequence]))
            positions.append(torch.arange(first, first + len(ids)))
            start += len(ids)
            self.done[sequence] += len(ids)
        batch = ForwardBatch(
            torch.cat([ids for _, ids in parts]), torch.cat(positions), tuple(spans), self.page
        )
        out = self.target(batch, self.cache, tap_layer_ids=tap_layer_ids)
        logits = self.target.compute_logits(out.hidden_states)
        taps = out.aux_hidden_states if tap_layer_ids else out.hidden_states[:, None]
        sizes = [len(ids) for _, ids in parts]
        return list(zip(logits.split(sizes), taps.split(sizes), strict=True))


def run_alone(
    target: LagunaForCausalLM, ids: torch.Tensor, parts: Sequence[int], *, seed: int = 0, page: int = PAGE
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one sequence in the given parts; return logits [S, V] and the taps of all layers [S, L, D]."""
    run = PagedRun(target, [len(ids)], seed, page)
    taps = tuple(range(target.config.num_hidden_layers))
    outs = [run.step([(0, piece)], taps)[0] for piece in ids.split(list(parts))]
    return torch.cat([logits for logits, _ in outs]), torch.cat([aux for _, aux in outs])
