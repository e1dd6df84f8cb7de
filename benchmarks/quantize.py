"""The quantiser: bytes that differ from compressed-tensors', and memory and speed of a conversion by size.

    python benchmarks/quantize.py --out results/quantize.json

Bytes: every kind of weight that can trip a quantiser, more than ten million of them, in three dtypes. Memory:
synthetic checkpoints of Laguna-XS's shapes with more and more layers, each converted by the command line in a
process of its own; beside it the speed at which the same disk takes plain copies.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lean_laguna.core.files import atomic_write_json
from lean_laguna.core.provenance import describe_run
from lean_laguna.quant.codec import encode
from lean_laguna.quant.scheme import FP8_BLOCK, FP8_CHANNEL, NVFP4, TensorSpec, packed_integer

SCHEMA_VERSION = 1
HIDDEN, EXPERTS, WIDTH, VOCAB = 2048, 256, 512, 100352
SCHEMES = {
    "nvfp4": NVFP4,
    "fp8-block": FP8_BLOCK,
    "fp8-channel": FP8_CHANNEL,
    "int8": packed_integer(8, None),
    "int4:128": packed_integer(4, 128),
}


def differing_bytes() -> dict[str, Any]:
    """Count weights compared and bytes that differ, per scheme."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from support.compressed import awkward_weights, their_tensors

    counts: dict[str, Any] = {}
    for name, scheme in SCHEMES.items():
        weights = differing = compared = 0
        for seed, dtype in enumerate((torch.bfloat16, torch.float32, torch.float16)):
            for weight in awkward_weights(512, 1024, dtype, seed).values():
                ours, theirs = encode(weight, scheme), their_tensors(weight, scheme)
                weights += weight.numel()
                for part, tensor in theirs.items():
                    a, b = (t.contiguous().view(torch.uint8) for t in (ours[part], tensor))
                    compared += a.numel()
                    differing += int((a != b).sum())
        counts[name] = {"num_weights": weights, "num_bytes": compared, "num_differing_bytes": differing}
        print(name, counts[name], flush=True)
    return counts


def shapes(num_layers: int) -> dict[str, tuple[int, ...]]:
    """Tensors of a checkpoint of Laguna-XS's shapes with fewer layers, all sparse."""
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for i in range(num_layers):
        layer = f"model.layers.{i}."
        for leaf, rows in (("q", 6144), ("k", 1024), ("v", 1024), ("g", 48)):
            found[f"{layer}self_attn.{leaf}_proj.weight"] = (rows, HIDDEN)
        found[f"{layer}self_attn.o_proj.weight"] = (HIDDEN, 6144)
        found[f"{layer}mlp.gate.weight"] = (EXPERTS, HIDDEN)
        names = [f"experts.{expert}" for expert in range(EXPERTS)] + ["shared_expert"]
        for name in names:
            for leaf in ("gate", "up"):
                found[f"{layer}mlp.{name}.{leaf}_proj.weight"] = (WIDTH, HIDDEN)
            found[f"{layer}mlp.{name}.down_proj.weight"] = (HIDDEN, WIDTH)
    return found


def write_synthetic(folder: Path, num_layers: int) -> int:
    """Write random weights, one file per layer and one for the rest; returns bytes."""
    folder.mkdir()
    noise = (torch.randn(1 << 22) * 0.02).bfloat16().view(torch.uint8).numpy()
    files: dict[str, dict[str, TensorSpec]] = {}
    for name, shape in shapes(num_layers).items():
        shard = name.split(".")[2] if ".layers." in name else "rest"
        files.setdefault(f"model-{shard}.safetensors", {})[name] = TensorSpec(shape, "BF16")
    total = 0
    for file, specs in files.items():
        header: dict[str, Any] = {}
        at = 0
        for name, spec in specs.items():
            offsets = [at, at + spec.num_bytes]
            header[name] = {"dtype": "BF16", "shape": list(spec.shape), "data_offsets": offsets}
            at += spec.num_bytes
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for i, spec in enumerate(specs.values()):
                turned = np.roll(noise, 2 * 997 * i)
                for first in range(0, spec.num_bytes, len(turned)):
                    stream.write(turned[: min(len(turned), spec.num_bytes - first)].data)
        total += at
    weight_map = {name: file for file, specs in files.items() for name in specs}
    atomic_write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})
    atomic_write_json(
        folder / "config.json", {"model_type": "laguna", "architectures": ["LagunaForCausalLM"]}
    )
    return total


def convert(source: Path, destination: Path, workers: int) -> dict[str, Any]:
    """Convert in a process of its own and return its report."""
    words = ["convert", "quantize", str(source), str(destination), "--scheme", "nvfp4", "--json"]
    words += ["--modules", "experts+attention", "--workers", str(workers)]
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "lean_laguna.cli.main", *words], capture_output=True, text=True, check=True
    )
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {
        "source_bytes": report["source_bytes"],
        "written_bytes": report["written_bytes"],
        "peak_rss_bytes": report["peak_rss_bytes"],
        "conversion_s": report["conversion_s"],
        "cpu_s": report["cpu_s"],
        "read_mb_per_cpu_s": report["source_bytes"] / report["cpu_s"] / 1e6,
        "whole_command_s": time.monotonic() - started,
        "read_mb_per_s": report["source_bytes"] / report["conversion_s"] / 1e6,
    }


def copy_speed(source: Path, destination: Path) -> float:
    """Return MB/s of copying the source's files and flushing them to the disk."""
    destination.mkdir()
    started, total = time.monotonic(), 0
    for file in source.glob("*.safetensors"):
        shutil.copyfile(file, destination / file.name)
        with (destination / file.name).open("rb") as stream:
            os.fsync(stream.fileno())
        total += file.stat().st_size
    return total / (time.monotonic() - started) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args()
    equality = differing_bytes()
    conversions = []
    for num_layers in args.layers:
        with tempfile.TemporaryDirectory(dir=args.scratch) as base:
            source = Path(base) / "source"
            write_synthetic(source, num_layers)
            found = {"num_layers": num_layers, **convert(source, Path(base) / "made", args.workers)}
            found["copy_mb_per_s"] = copy_speed(source, Path(base) / "copy")
            print(found, flush=True)
            conversions.append(found)
    result = {
        "schema_version": SCHEMA_VERSION,
        "benchmark": "quantize",
        **describe_run(),
        "workers": args.workers,
        "equality_with_compressed_tensors": equality,
        "conversions": conversions,
    }
    atomic_write_json(args.out, result)


if __name__ == "__main__":
    main()
