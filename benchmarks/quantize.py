"""The quantiser: bytes that differ from compressed-tensors', and memory and speed of a conversion by size.

    python benchmarks/quantize.py --out results/quantize.json

Bytes: every kind of weight that can trip a quantiser, more than ten million of them, in three dtypes. Memory:
synthetic checkpoints of Laguna-XS's shape with more and more layers, each read from the disk and converted by
the command line, by so many workers, killed midway if wanted; beside it the speeds at which the same disk is
read and takes plain copies. All 40 layers are 67 GB; a file system that can clone (XFS, Btrfs) stores 5:

    python benchmarks/quantize.py --out results/quantize.json --scratch /mnt/xfs --layers 40 --kill-at 0.4
"""

from __future__ import annotations

import argparse
import dataclasses
import fcntl
import hashlib
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

from lean_laguna.core.cpus import usable_cpus
from lean_laguna.core.files import atomic_write_json
from lean_laguna.core.model_config import LagunaConfig
from lean_laguna.core.provenance import describe_run
from lean_laguna.models.shapes import laguna_shape
from lean_laguna.plan.modules import target_modules
from lean_laguna.quant.codec import encode
from lean_laguna.quant.scheme import FP8_BLOCK, FP8_CHANNEL, NVFP4, TensorSpec, packed_integer

SCHEMA_VERSION = 2
# Linux's number of the call that clones a file.
FICLONE, HEADER_BLOCK, COPIED_FILES = 0x40049409, 4096, 2
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


def shape_of(num_layers: int) -> LagunaConfig:
    """Return Laguna-XS's shape with its first layers only."""
    whole = laguna_shape("laguna-xs-2.1")
    cut = {
        name: getattr(whole, name)[:num_layers]
        for name in ("num_attention_heads_per_layer", "layer_types", "mlp_layer_types", "gating")
    }
    return dataclasses.replace(whole, num_hidden_layers=num_layers, **cut)


def write_synthetic(folder: Path, config: LagunaConfig) -> int:
    """Write random weights, one file per layer and one for the rest; returns bytes.

    Layers of a kind have the same weights. Where the file system can, they share their place on the disk: a
    checkpoint then takes little of it, and is read as any other.
    """
    folder.mkdir()
    noise = (torch.randn(1 << 22) * 0.02).bfloat16().view(torch.uint8).numpy()
    files: dict[str, dict[str, TensorSpec]] = {}
    for module in target_modules(config):
        name = module.name if module.name.endswith("_bias") else f"{module.name}.weight"
        shard = name.split(".")[2] if ".layers." in name else "rest"
        files.setdefault(f"model-{shard}.safetensors", {})[name] = TensorSpec(module.shape, "BF16")
    total, written = 0, {}
    for file, specs in files.items():
        head, size = header(specs)
        kind = tuple(specs.values())
        if kind not in written or not clone(written[kind], folder / file):
            with (folder / file).open("wb") as stream:
                stream.write(head)
                for i, spec in enumerate(kind):
                    turned = np.roll(noise, 2 * 997 * i)
                    for first in range(0, spec.num_bytes, len(turned)):
                        stream.write(turned[: min(len(turned), spec.num_bytes - first)].data)
        with (folder / file).open("r+b") as stream:
            stream.write(head)
        written[kind] = folder / file
        total += size
    weight_map = {name: file for file, specs in files.items() for name in specs}
    atomic_write_json(folder / "model.safetensors.index.json", {"weight_map": weight_map})
    atomic_write_json(folder / "config.json", config.to_dict() | {"dtype": "bfloat16"})
    return total


def header(specs: dict[str, TensorSpec]) -> tuple[bytes, int]:
    """Return a file's header, filled up to whole blocks of a disk, and the bytes that follow it."""
    entries: dict[str, Any] = {}
    at = 0
    for name, spec in specs.items():
        offsets = [at, at + spec.num_bytes]
        entries[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": offsets}
        at += spec.num_bytes
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % HEADER_BLOCK)
    return len(text).to_bytes(8, "little") + text, at


def clone(file: Path, copy: Path) -> bool:
    """Make a copy that shares its place on the disk; returns whether the file system can."""
    with file.open("rb") as source, copy.open("wb") as destination:
        try:
            fcntl.ioctl(destination.fileno(), FICLONE, source.fileno())
        except OSError:
            return False
    return True


def convert(source: Path, destination: Path, workers: int, kill_at: float) -> dict[str, Any]:
    """Convert in a process of its own and return its report; killed once where ``kill_at`` is above 0."""
    words = ["convert", "quantize", str(source), str(destination), "--scheme", "nvfp4", "--json"]
    words += ["--modules", "experts+attention", "--workers", str(workers)]
    command = [sys.executable, "-m", "lean_laguna.cli.main", *words]
    drop_from_memory(source)
    killed = kill_midway(command, source, destination, kill_at) if kill_at else {}
    drop_from_memory(source)
    started = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    read_bytes = report["source_bytes"] - killed.get("finished_bytes", 0)
    return killed | {
        "num_workers": report["num_workers"],
        "source_bytes": report["source_bytes"],
        "read_bytes": read_bytes,
        "written_bytes": report["written_bytes"],
        "num_resumed_files": report["num_resumed_files"],
        "peak_rss_bytes": report["peak_rss_bytes"],
        "conversion_s": report["conversion_s"],
        "cpu_s": report["cpu_s"],
        "read_mb_per_cpu_s": read_bytes / report["cpu_s"] / 1e6,
        "whole_command_s": time.monotonic() - started,
        "read_mb_per_s": read_bytes / report["conversion_s"] / 1e6,
    }


def kill_midway(command: list[str], source: Path, destination: Path, share: float) -> dict[str, Any]:
    """Kill a conversion without warning once a share of its files is finished; returns what it had taken."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    wanted = share * len(list(source.glob("*.safetensors")))
    partial = destination.with_name(f".{destination.name}.partial")
    peak = 0
    while process.poll() is None and len(list(partial.glob("*.safetensors"))) < wanted:
        status = Path(f"/proc/{process.pid}/status").read_text()
        peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
        time.sleep(1)
    process.kill()
    process.wait()
    finished = [source / file.name for file in partial.glob("*.safetensors")]
    return {
        "killed_after_files": len(finished),
        "finished_bytes": sum(file.stat().st_size for file in finished),
        "killed_peak_rss_bytes": peak,
    }


def drop_from_memory(source: Path) -> None:
    """Have a source read from the disk, not from memory."""
    for file in source.glob("*.safetensors"):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def differing_layers(made: Path, config: LagunaConfig) -> int:
    """Return the layers whose converted bytes differ from those of the first of their kind."""
    found: dict[Any, bytes] = {}
    differing = 0
    for i, kind in enumerate(zip(config.layer_types, config.mlp_layer_types, strict=True)):
        digest = hashlib.sha256()
        with (made / f"model-{i}.safetensors").open("rb") as stream:
            stream.seek(8 + int.from_bytes(stream.read(8), "little"))
            while piece := stream.read(1 << 20):
                digest.update(piece)
        differing += found.setdefault(kind, digest.digest()) != digest.digest()
    return differing


def disk_speeds(source: Path, destination: Path) -> dict[str, float]:
    """Return MB/s of reading some of the source's files from the disk, and of copying them on it."""
    files = sorted(source.glob("*.safetensors"), key=lambda file: -file.stat().st_size)[:COPIED_FILES]
    total = sum(file.stat().st_size for file in files)
    drop_from_memory(source)
    buffer, started = bytearray(16 << 20), time.monotonic()
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass
    read_s = time.monotonic() - started
    destination.mkdir()
    drop_from_memory(source)
    started = time.monotonic()
    for file in files:
        shutil.copyfile(file, destination / file.name)
        with (destination / file.name).open("rb") as stream:
            os.fsync(stream.fileno())
    copy_s = time.monotonic() - started
    return {"disk_read_mb_per_s": total / read_s / 1e6, "disk_copy_mb_per_s": total / copy_s / 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--workers", type=int, nargs="+", default=sorted({1, usable_cpus()}))
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--kill-at", type=float, default=0.0, metavar="SHARE", help="kill each once, go on")
    args = parser.parse_args()
    equality = differing_bytes()
    conversions = []
    for num_layers in args.layers:
        with tempfile.TemporaryDirectory(dir=args.scratch) as base:
            source = Path(base) / "source"
            config = shape_of(num_layers)
            write_synthetic(source, config)
            speeds = disk_speeds(source, Path(base) / "copy")
            shutil.rmtree(Path(base) / "copy")
            print(speeds, flush=True)
            for workers in args.workers:
                made = Path(base) / "made"
                found = {"num_layers": num_layers, **convert(source, made, workers, args.kill_at), **speeds}
                found["num_differing_layers"] = differing_layers(made, config)
                shutil.rmtree(made)
                print(found, flush=True)
                conversions.append(found)
    result = {
        "schema_version": SCHEMA_VERSION,
        "benchmark": "quantize",
        **describe_run(),
        "equality_with_compressed_tensors": equality,
        "conversions": conversions,
    }
    atomic_write_json(args.out, result)


if __name__ == "__main__":
    main()
