"""What a drafter reads of its target, kept on disk or computed when it is needed, to the same bits.

A row of features is [S, m + 1, D] bfloat16: the tapped residuals, then the last one before the final norm,
which is applied on reading. Shards are plain arrays, memory-mapped.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lean_laguna.core.errors import ConfigError, DataError
from lean_laguna.core.files import (
    atomic_write_json,
    atomic_writer,
    hold_folder,
    parse_json,
    remove_unfinished,
)
from lean_laguna.models.laguna import LagunaForCausalLM
from lean_laguna.train.documents import Packed
from lean_laguna.train.drafter_forward import TargetStates
from lean_laguna.train.processes import Processes

META = "features.json"
SHARD_BYTES = 1 << 30


@torch.no_grad()
def compute_features(
    target: LagunaForCausalLM, tokens: Tensor, layer_ids: tuple[int, ...], document_ids: Tensor
) -> Tensor:
    """Run the target over packed rows.

    Args:
        target: The target.
        tokens: [B, S] int64 on its device.
        layer_ids: Tapped decoder layers, 0-based.
        document_ids: [B, S] on its device.

    Returns:
        [B, S, m + 1, D] bfloat16.
    """
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
        out = target.forward_dense(
            tokens, document_ids=document_ids, tap_layer_ids=layer_ids, attention="sdpa"
        )
    assert out.aux_hidden_states is not None
    return torch.cat([out.aux_hidden_states, out.last_residual.unsqueeze(2)], dim=2).to(torch.bfloat16)


def states_of(features: Tensor, target: LagunaForCausalLM) -> TargetStates:
    """Turn features [..., m + 1, D] into what the loss reads: float32 on a CPU, bfloat16 on a GPU."""
    kind = torch.bfloat16 if features.is_cuda else torch.float32
    norm = target.model.norm
    last = F.rms_norm(features[..., -1, :].float(), (features.shape[-1],), norm.weight.float(), norm.eps)
    return TargetStates(features[..., :-1, :].to(kind), last.to(kind))


@dataclass(frozen=True)
class FeatureCache:
    """Rows of features on disk.

    Attributes:
        shards: [rows, S, m + 1, D] bfloat16 each, memory-mapped.
        rows_per_shard: Rows of every shard but the last.
    """

    shards: tuple[Tensor, ...]
    rows_per_shard: int

    def read(self, rows: Tensor, device: torch.device) -> Tensor:
        """Return the features of rows [B] int64, [B, S, m + 1, D] bfloat16 on a device."""
        parts = [self.shards[r // self.rows_per_shard][r % self.rows_per_shard] for r in rows.tolist()]
        return torch.stack(parts).to(device)


def open_cache(
    folder: Path,
    packed: Packed,
    target: LagunaForCausalLM,
    layer_ids: tuple[int, ...],
    target_sha256: str,
    report: Callable[[str], None] = lambda line: None,
    processes: Processes = Processes(),  # noqa: B008 (frozen)
) -> FeatureCache:
    """Open a cache that belongs to these rows and this target, computing what it lacks first.

    Says how many bytes it will take before the first is written. A killed run goes on after the last whole
    shard. Several runs may read one cache; one alone may write it.

    Args:
        folder: Made if absent.
        packed: The rows.
        target: The target, on the device to use.
        layer_ids: Tapped layers.
        target_sha256: Of its checkpoint.
        report: Receives lines.
        processes: Each writes its share of the shards; all must call this.

    Raises:
        ConfigError: The folder holds features of something else, another run is writing there, or the disk
            has too little room.
        DataError: A shard has another size than it should.
    """
    length, width = packed.tokens.shape[1], target.config.hidden_size
    shape = (length, len(layer_ids) + 1, width)
    row_bytes = 2 * shape[0] * shape[1] * shape[2]
    per_shard = max(1, SHARD_BYTES // row_bytes)
    meta = {
        "rows_sha256": packed.sha256,
        "target_sha256": target_sha256,
        "layer_ids": list(layer_ids),
        "rows": len(packed.tokens),
        "shape": list(shape),
        "dtype": "bfloat16",
        "rows_per_shard": per_shard,
    }
    starts = range(0, len(packed.tokens), per_shard)
    if processes.is_first:
        folder.mkdir(parents=True, exist_ok=True)
        if _missing(folder, len(starts)) or not (folder / META).exists():
            hold_folder(folder)
            remove_unfinished(folder)
        _claim(folder, meta)
    processes.wait()  # what is unfinished has been removed: from here on it is another's at work
    missing = _missing(folder, len(starts))
    if missing:
        needed = sum(min(per_shard, len(packed.tokens) - starts[i]) for i in missing) * row_bytes
        report(f"features: {needed:,} bytes to write to {folder} ({row_bytes // length:,} a token)")
        _check_room(folder, needed)
    for i in missing:
        if i % processes.count != processes.rank:
            continue
        rows = torch.arange(starts[i], min(starts[i] + per_shard, len(packed.tokens)))
        _write_shard(_shard(folder, i), packed, target, layer_ids, rows)
        report(f"features: shard {i + 1} of {len(starts)} written")
    processes.wait()
    shards = []
    for i, start in enumerate(starts):
        count = min(per_shard, len(packed.tokens) - start)
        file = _shard(folder, i)
        if file.stat().st_size != count * row_bytes:
            raise DataError(
                f"'{file}' has {file.stat().st_size} bytes, expected {count * row_bytes}; remove it"
            )
        flat = torch.from_file(str(file), shared=False, size=count * row_bytes // 2, dtype=torch.bfloat16)
        shards.append(flat.view(count, *shape))
    return FeatureCache(tuple(shards), per_shard)


def _shard(folder: Path, index: int) -> Path:
    return folder / f"features-{index:05}.bf16"


def _missing(folder: Path, num_shards: int) -> list[int]:
    return [i for i in range(num_shards) if not _shard(folder, i).exists()]


def _check_room(folder: Path, needed: int) -> None:
    free = _free_bytes(folder)
    if needed > free:
        raise ConfigError(
            f"--features {folder}: {needed:,} bytes are needed and {free:,} are free there; leave it out "
            "to compute features as they are needed"
        )


def _claim(folder: Path, meta: dict[str, Any]) -> None:
    file = folder / META
    if not file.exists():
        atomic_write_json(file, meta)
        return
    try:
        stored = dict(parse_json(file.read_bytes()))
    except (OSError, ValueError, TypeError):
        raise DataError(f"'{file}' is damaged; remove the folder to have the states computed again") from None
    names = [name for name, value in meta.items() if stored.get(name) != value]
    if names:
        raise ConfigError(
            f"--features {folder}: holds features of something else: {', '.join(names)} differ; give another "
            "folder, or remove it"
        )


def _write_shard(
    file: Path, packed: Packed, target: LagunaForCausalLM, layer_ids: tuple[int, ...], rows: Tensor
) -> None:
    device = target.lm_head.weight.device
    with atomic_writer(file) as out:
        for row in rows.tolist():
            tokens = packed.tokens[row : row + 1].long().to(device)
            owners = packed.document_ids[row : row + 1].to(device)
            features = compute_features(target, tokens, layer_ids, owners)
            out.write(features.cpu().contiguous().view(torch.int16).numpy().tobytes())


def _free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
