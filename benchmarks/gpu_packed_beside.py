"""One quantised build in our engine or in vLLM: decode speed of a single stream, measured alike.

    PYTHONPATH=src python benchmarks/gpu_packed_beside.py --side ours --build nvfp4 --out FILE

Random weights in Laguna-XS's shape, prompt 2,048, 513 tokens; decode is 512 tokens over the time of 513 less
the time of 1, as seen by the caller. ``--side vllm``: its site on PYTHONPATH; NVFP4 is for weights only, FP8
has a scale a row and dynamic activations, and the head stays BF16. More of ours: ``gpu_packed.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gpu_beside_vllm import DRAFTS, RATES, Generate, Side, laguna_xs, quantization, spread_weights

NOT_QUANTISED = {
    "nvfp4": ("re:.*self_attn.*", "re:.*layers[.]0[.]mlp[.].*"),
    "nvfp4-attention": ("re:.*self_attn[.]g_proj$", "re:.*layers[.]0[.]mlp[.].*"),
    "fp8-all": (),
}
"""What vLLM's builds leave in BF16 beside the head and the routers."""


def ours(build: str, num_drafts: int) -> tuple[Generate, dict[str, Any]]:
    """Return how to generate with our engine, and what ran."""
    from lean_laguna.core.provenance import describe_run
    from lean_laguna.core.types import SamplingParams
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

    def generate(prompts: Sequence[list[int]], new: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        start = time.perf_counter()
        llm.generate(list(prompts), params, num_speculative_tokens=num_drafts)
        return time.perf_counter() - start

    return generate, describe_run(None) | {"kernels": llm.engine.kernels}


def vllm(build: str, num_drafts: int) -> tuple[Generate, dict[str, Any]]:
    """Return how to generate with vLLM, with CUDA graphs, and what ran."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process, so that the loader is ours to change
    import vllm as package
    from vllm import LLM, SamplingParams

    target, drafter = laguna_xs()
    if build != "bf16":
        found = quantization("nvfp4" if build.startswith("nvfp4") else "fp8")
        ignored = ["lm_head", "re:.*mlp[.]gate$", *NOT_QUANTISED[build]]
        target["quantization_config"] = found | {"ignore": ignored}
    folders = [Path(tempfile.gettempdir()) / f"laguna-xs-{name}" for name in (build, "dflash")]
    for folder, config in zip(folders, (target, drafter), strict=True):
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
    spread_weights()
    options: dict[str, Any] = {
        "model": str(folders[0]),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "max_num_seqs": 1,
        "gpu_memory_utilization": 0.6,
        "enable_prefix_caching": False,
        "compilation_config": {"cudagraph_capture_sizes": [1 + num_drafts]},
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
        llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        return time.perf_counter() - start

    return generate, {"vllm": package.__version__}


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
