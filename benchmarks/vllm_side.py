"""vLLM with random weights in Laguna-XS's shape, as the comparisons run it. Nothing to run here."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

RATES = (0.90, 0.81, 0.73, 0.62, 0.52, 0.46, 0.40)
"""Of the drafts that either side accepts, given the ones before."""
Generate = Callable[[Sequence[list[int]], int], float]
"""Prompts and new tokens of each to seconds."""


def laguna_xs(layers: int = 40) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the configurations of a target and a DFlash drafter as vLLM reads them."""
    kinds = ["sliding_attention" if i % 4 else "full_attention" for i in range(layers)]
    shared: dict[str, Any] = {
        "model_type": "laguna",
        "vocab_size": 100352,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "gating": True,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "sliding_window": 512,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8,
        "moe_routed_scaling_factor": 2.5,
        "torch_dtype": "bfloat16",
        "bos_token_id": 2,
        "eos_token_id": 2,
    }
    swa = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 8192,
        "beta_fast": 64.0,
        "beta_slow": 1.0,
        "attention_factor": 1.0,
        "partial_rotary_factor": 0.5,
    }
    target = shared | {
        "architectures": ["LagunaForCausalLM"],
        "num_hidden_layers": layers,
        "layer_types": kinds,
        "num_attention_heads": 48,
        "num_attention_heads_per_layer": [48 if kind == "full_attention" else 64 for kind in kinds],
        "num_experts": 256,
        "mlp_only_layers": [0],
        "mlp_layer_types": ["dense"] + ["sparse"] * (layers - 1),
        "rope_parameters": yarn,
        "swa_rope_parameters": swa,
        "partial_rotary_factor": 0.5,
    }
    drafter = shared | {
        "architectures": ["DFlashLagunaForCausalLM"],
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention"] * 5,
        "num_attention_heads": 64,
        "num_attention_heads_per_layer": [64] * 5,
        "num_experts": 0,
        "mlp_only_layers": list(range(5)),
        "mlp_layer_types": ["dense"] * 5,
        "rope_parameters": swa,
        "swa_rope_parameters": swa,
        "partial_rotary_factor": 1.0,
        "draft_vocab_size": 100352,
        "block_size": 16,
        "dflash_config": {
            "target_layer_ids": [1, 13, 25, 33, 39],
            "mask_token_id": 12,
            "block_size": 16,
            "causal": True,
        },
    }
    return target, drafter


def quantization(name: str) -> dict[str, Any]:
    """Return compressed-tensors' description of experts and shared expert in NVFP4 or FP8, the rest BF16."""
    weights: dict[str, Any] = {"type": "float", "symmetric": True, "dynamic": False}
    inputs: dict[str, Any] | None = None
    if name == "nvfp4":
        kind = "nvfp4-pack-quantized"
        weights |= {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
    else:
        kind = "float-quantized"
        weights |= {"num_bits": 8, "strategy": "channel"}
        inputs = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": kind}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group | {"output_activations": None}},
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp[.]gate$", "re:.*layers[.]0[.]mlp[.].*"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def spread_weights() -> None:
    """Make vLLM's dummy weights spread: as they come, the routing bias sends every token the same way."""
    import torch
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    load = DummyModelLoader.load_weights

    def spread(self: Any, model: torch.nn.Module, config: Any) -> None:
        load(self, model, config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                weight = parameter.data
                if "global_scale" in name:
                    weight.fill_(256.0)  # a divisor: scales of 8 and codes of a few give about 0.1
                elif "scale" in name and weight.element_size() == 1:
                    weight.view(torch.uint8).fill_(0x50)  # 8
                elif "scale" in name:
                    weight.fill_(5e-4)
                elif "norm" in name:
                    weight.fill_(1.0)
                elif "bias" in name:
                    weight.zero_()
                elif weight.dtype in (torch.bfloat16, torch.float32):
                    weight.normal_(0.0, 0.02)
                elif weight.dtype == torch.uint8:
                    weight.random_(0, 256)
                elif weight.dtype == torch.float8_e4m3fn:
                    weight.view(torch.uint8).random_(0, 256).bitwise_and_(0xEF)  # no NaN

    DummyModelLoader.load_weights = spread


def start(
    name: str, quantised: dict[str, Any] | None, num_drafts: int, **options: Any
) -> tuple[Any, Generate, str]:
    """Start vLLM in this process.

    Args:
        name: Of the target's folder, which stays, so that what torch.compile keeps is found again.
        quantised: The target's quantization_config, if any.
        num_drafts: Draft tokens a step; 0 without a drafter.
        options: Further ones of vLLM's ``LLM``.

    Returns:
        vLLM's ``LLM``, how to generate with it, and its version.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process, so that the loader is ours to change
    import vllm
    from vllm import LLM, SamplingParams

    target, drafter = laguna_xs()
    if quantised:
        target["quantization_config"] = quantised
    folders = [Path(tempfile.gettempdir()) / f"laguna-xs-{kind}" for kind in (name, "dflash")]
    for folder, config in zip(folders, (target, drafter), strict=True):
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
    spread_weights()
    options |= {
        "model": str(folders[0]),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "enable_prefix_caching": False,
    }
    if num_drafts:
        options["speculative_config"] = {
            "model": str(folders[1]),
            "method": "dflash",
            "num_speculative_tokens": num_drafts,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": list(RATES[:num_drafts]),
            "draft_load_config": {"load_format": "dummy"},
        }
    llm = LLM(**options)

    def generate(prompts: Sequence[list[int]], new: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert all(len(output.outputs[0].token_ids) == new for output in outputs)
        return seconds

    return llm, generate, vllm.__version__
