"""What a decode step reads from memory, by kernel class, and how fast this card reads: for profiles."""

from __future__ import annotations

import torch

from lean_laguna.engine.gpu_programs import StepPrograms
from lean_laguna.kernels.triton.probe import BLOCK, STEPS, read_all
from lean_laguna.kernels.triton.weights import DenseWeights

# By kernel name, in order: the first word found decides.
CLASSES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("experts down", ("expert_down", "experts_down", "expert_chunk_down")),
    ("experts gate/up", ("expert_gate_up", "experts_up", "expert_chunk_up", "rout")),
    ("attention", ("attend", "attention", "combine")),
    ("head", ("head_kernel", "best_kernel", "walk_kernel")),
    ("dense products", ("project", "gate_up", "gemm", "gemv", "cutlass")),
)
OTHER = "other"
_PROBE_BYTES, _PROBE_READS = 1 << 30, 8


def class_of(kernel: str) -> str:
    """Return the class of a kernel by its name."""
    return next((name for name, words in CLASSES if any(word in kernel for word in words)), OTHER)


def step_bytes(programs: StepPrograms, context_len: int) -> dict[str, int]:
    """Return the bytes that one row's step must read, by class.

    Args:
        programs: Of the engine.
        context_len: Keys before the row.
    """
    found = dict.fromkeys([name for name, _ in CLASSES] + [OTHER], 0)
    item = programs.target.embed.element_size()
    for layer in programs.target.layers:
        attention, mlp = layer.attention, layer.mlp
        shape = attention.shape
        keys = min(context_len, shape.window) if shape.window else context_len
        found["attention"] += 2 * keys * shape.num_kv_heads * shape.head_dim * item
        for weight in (attention.qkv, attention.gate, attention.out):
            found["dense products"] += 0 if weight is None else weight.nbytes
        if isinstance(mlp, DenseWeights):
            found["dense products"] += mlp.gate_up.nbytes + mlp.down.nbytes
            continue
        share = mlp.top_k / mlp.gate_up.shape[0]
        found["dense products"] += mlp.router_gate_up.nbytes
        found["dense products"] += 0 if mlp.shared_gate_up is None else mlp.shared_gate_up.nbytes
        found["experts gate/up"] += int(mlp.gate_up.nbytes * share)
        found["experts down"] += int(mlp.down.nbytes * share) + mlp.shared_down.nbytes
    found["head"] += programs.target.head.nbytes
    return found


def read_bandwidth(device: torch.device) -> float:
    """Return the bytes a second that a kernel reaches which only reads."""
    words = torch.empty(_PROBE_BYTES // 4, dtype=torch.int32, device=device).random_()
    sums = torch.empty(words.numel() // (BLOCK * STEPS), dtype=torch.int32, device=device)
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        num_bytes = sum(read_all(words, sums) for _ in range(_PROBE_READS))
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) / 1e3)
    return num_bytes / min(times)
