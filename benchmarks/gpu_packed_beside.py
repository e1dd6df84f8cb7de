"""One quantised build in our engine or in vLLM: decode speed of a single stream, measured alike.

    PYTHONPATH=src python benchmarks/gpu_packed_beside.py --side ours --build nvfp4 --out FILE

Random weights in Laguna-XS's shape, prompt 2,048, 513 tokens; decode is 512 tokens over the time of 513 less
the time of 1, as seen by the caller. ``--side vllm``: its site on PYTHONPATH; NVFP4 is for weights only, FP8
has a scale a row and dynamic activations, and the head stays BF16. More of ours: ``gpu_packed.py``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import vllm_side
from gpu_beside_vllm import DRAFTS, RATES, Generate, Side, our_way

NOT_QUANTISED = {
    "nvfp4": ("re:.*self_attn.*", "re:.*layers[.]0[.]mlp[.].*"),
    "nvfp4-attention": ("re:.*self_attn[.]g_proj$", "re:.*layers[.]0[.]mlp[.].*"),
    "fp8-all": (),
}
"""What vLLM's builds leave in BF16 beside the head and the routers."""


def ours(build: str, num_drafts: int) -> tuple[Generate, dict[str, Any]]:
    """Return how to generate with our engine, and what ran."""
    from lean_laguna.core.provenance import describe_run
    from lean_laguna.engine.llm import LLM

    drafts = {
        "model": "dummy",
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": RATES[:num_drafts],
    }
    llm = LLM(
        "laguna-xs",
        load_format="dummy",
        shape="laguna-xs",
        scheme=build,
        max_model_len=4096,
        max_num_seqs=1,
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=False,
        speculative_config=drafts if num_drafts else None,
    )

    about = describe_run(None) | {"kernels": llm.engine.kernels}
    return our_way(llm, num_drafts), about


def vllm(build: str, num_drafts: int) -> tuple[Generate, dict[str, Any]]:
    """Return how to generate with vLLM, with CUDA graphs, and what ran."""
    quantised = None
    if build != "bf16":
        ignored = ["lm_head", "re:.*mlp[.]gate$", *NOT_QUANTISED[build]]
        quantised = vllm_side.quantization("nvfp4" if build.startswith("nvfp4") else "fp8")
        quantised |= {"ignore": ignored}
    _, generate, version = vllm_side.start(
        build,
        quantised,
        num_drafts,
        max_model_len=4096,
        max_num_seqs=1,
        gpu_memory_utilization=0.6,
        compilation_config={"cudagraph_capture_sizes": [1 + num_drafts]},
    )
    return generate, {"vllm": version}


def main() -> None:
    """Measure one build on one side."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", choices=("ours", "vllm"), required=True)
    parser.add_argument("--build", choices=("bf16", *NOT_QUANTISED), required=True)
    parser.add_argument("--drafts", type=int, default=0, choices=range(DRAFTS + 1))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    sides: dict[str, Callable[[str, int], tuple[Generate, dict[str, Any]]]] = {"ours": ours, "vllm": vllm}
    begin = time.monotonic()
    own = argparse.Namespace(seconds=600, tiny=False, result=args.out)
    side = Side(own, begin)
    generate, about = sides[args.side](args.build, args.drafts)
    side.found |= about | {"synthetic": True, "build": args.build, "drafts": args.drafts}
    generate(side.prompts(1, 16), 2)
    side.found["first_token_s"] = round(time.monotonic() - begin, 1)
    side.measure("single stream", lambda: side.one_stream(generate, 2048, 513, 3))
    print(json.dumps(side.found))


if __name__ == "__main__":
    main()
