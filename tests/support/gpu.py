"""A toy Laguna and its drafter, small enough for Triton's interpreter, and engines over both."""

from __future__ import annotations

import functools
from typing import Any

import tokenizers
import torch

from lean_laguna.core.config import EngineConfig, SpeculativeConfig
from lean_laguna.core.drafter_config import DFlashConfig
from lean_laguna.core.model_config import LagunaConfig
from lean_laguna.engine.llm_engine import LLMEngine
from lean_laguna.models.dflash import DFlashDrafter
from lean_laguna.models.drafter_checkpoint import make_drafter
from lean_laguna.models.drafter_quantising import quantise_drafter
from lean_laguna.models.dspark import DSparkDrafter
from lean_laguna.models.laguna import LagunaForCausalLM
from lean_laguna.models.tokenizer import Tokenizer
from lean_laguna.spec.dspark_proposer import make_proposer
from support.targets import laguna_json
from support.tokenizers import byte_level_json

VOCAB, EOS, WINDOW, MAX_LEN = 288, 2, 8, 64
LAYERS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 2,
    "layer_types": ["full_attention", "sliding_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "intermediate_size": 16,
    "num_experts": 4,
    "sliding_window": WINDOW,
}
"""Of a toy target: a full dense layer and a sliding sparse one."""


@functools.cache
def toy_tokenizer() -> Tokenizer:
    """Byte-level; token 2 ends a sequence."""
    return Tokenizer(tokenizers.Tokenizer.from_str(byte_level_json(VOCAB)), (EOS,))


@functools.cache
def toy_target() -> LagunaForCausalLM:
    """Return a full dense and a sliding sparse layer, random; never changed by tests."""
    config = LagunaConfig.from_dict(
        laguna_json(
            **LAYERS,
            hidden_size=16,
            num_attention_heads_per_layer=[1, 2],
            num_key_value_heads=1,
            moe_intermediate_size=8,
            shared_expert_intermediate_size=8,
        ),
        "toy",
    )
    target = LagunaForCausalLM(config)
    target.reset_parameters(std=0.25, generator=torch.Generator().manual_seed(1))
    return target.eval()


@functools.cache
def toy_drafter(kind: str = "dflash", **heads: Any) -> DFlashDrafter:
    """Return a random drafter of one sliding layer with a block of 8.

    Args:
        kind: ``dflash``, ``dspark``, ``fp8`` (DSpark, quantised) or ``shifted``: a DSpark drafter whose
            blocks are bidirectional, too.
        heads: Changes to ``dspark_config``.
    """
    spark = {"markov_rank": 8, "greedy_biases": [0.5], "sampled_temperatures": [0.5, 2.0], **heads}
    config = DFlashConfig.from_dict(
        {
            "architectures": ["DFlashLagunaForCausalLM" if kind == "dflash" else "LagunaDSparkModel"],
            **({} if kind == "dflash" else {"dspark_config": spark}),
            "model_type": "laguna",
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "intermediate_size": 16,
            "layer_types": ["sliding_attention"],
            "sliding_window": WINDOW,
            "gating": "per-head",
            "vocab_size": VOCAB,
            "draft_vocab_size": VOCAB,
            "max_position_embeddings": 256,
            "num_target_layers": 2,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "block_size": 8,
            "dflash_config": {
                "target_layer_ids": [0, 1],
                "mask_token_id": 12,
                "causal": kind != "shifted",
                "sample_from_anchor": kind == "shifted",
            },
        },
        "toy drafter",
    )
    drafter = make_drafter(config)
    generator = torch.Generator().manual_seed(2)
    drafter.init_weights(std=0.25, generator=generator)
    if isinstance(drafter, DSparkDrafter):
        for weight in (drafter.markov_w2, drafter.confidence_weight, drafter.confidence_bias):
            if weight is not None:
                torch.nn.init.normal_(weight, std=0.5, generator=generator)
    if kind == "fp8":
        quantise_drafter(drafter)
    return drafter.eval()


def toy_config(**options: Any) -> EngineConfig:
    """Return chunks of 8 and pages of 4."""
    usual = {"prefill_chunk_size": 8, "kv_block_size": 4, "max_num_seqs": 20, "seed": 0}
    return EngineConfig(**{**usual, "max_model_len": MAX_LEN, **options})


def toy_engine(
    num_drafts: Any = None,
    *,
    kind: str = "dflash",
    synthetic_rates: tuple[float, ...] = (),
    **options: Any,
) -> LLMEngine:
    """Return an engine on the Triton kernels; without a drafter where ``num_drafts`` is None."""
    from lean_laguna.engine.gpu_engine import GpuEngine

    proposer = None if num_drafts is None else make_proposer(toy_drafter(kind), toy_target())
    if synthetic_rates:
        options["speculative"] = SpeculativeConfig(
            "toy", rejection_sample_method="synthetic", synthetic_acceptance_rates=synthetic_rates
        )
    return GpuEngine(
        toy_target(), toy_tokenizer(), proposer, toy_config(**options), num_speculative_tokens=num_drafts
    )
