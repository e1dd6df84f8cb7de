"""What ``inspect`` finds, as plain data: weights, bytes, ceilings. Shown by ``inspect_report``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lean_laguna.plan.bandwidth import Bandwidth
from lean_laguna.plan.modules import CLASSES
from lean_laguna.plan.subject import Drafter, Target
from lean_laguna.plan.traffic import (
    CODE_ACCEPTANCE,
    SOURCE_PARTS,
    Workload,
    counted,
    distinct_experts,
    draft_bytes,
    pass_bytes,
    tokens_per_step,
)

USUAL_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)


@dataclass(frozen=True)
class Question:
    """What is asked about a checkpoint.

    Attributes:
        bandwidth: Of the machine that it would run on.
        context: Positions whose keys and values a token reads.
        rows: Numbers of verified rows.
        overlap: Share of experts that rows have in common.
        kv_element_bytes: Bytes of a key or value element.
        rates: Acceptance up to each draft position.
    """

    bandwidth: Bandwidth
    context: int = 2048
    rows: Sequence[int] = USUAL_ROWS
    overlap: float = 0.0
    kv_element_bytes: int = 2
    rates: Sequence[float] = CODE_ACCEPTANCE

    def workload(self, num_rows: int) -> Workload:
        """Return the pass of so many rows."""
        return Workload(num_rows, self.context, self.overlap, self.kv_element_bytes)


def inspect(target: Target, drafter: Drafter | None, question: Question) -> dict[str, Any]:
    """Answer a question about a target, and a drafter for it.

    Raises:
        ConfigError: The drafter was not made for this target.
    """
    if drafter is not None:
        drafter.config.check_target(target.config, drafter.name)
    config, inventory = target.config, target.inventory
    parts = pass_bytes(config, inventory, question.workload(1))
    embedding = inventory.num_weights("embedding")
    idle = config.num_experts - config.num_experts_per_tok
    unread = inventory.num_weights("experts") * idle // config.num_experts if config.num_experts else 0
    return {
        "kind": "inspect",
        "model": {
            "name": target.name,
            "known_from": target.known_from,
            "num_weights": inventory.num_weights(),
            "num_weights_per_token": inventory.num_weights()
            - unread
            - (0 if config.tie_word_embeddings else embedding),
            "stored_bytes": inventory.stored_bytes,
            "has_fp8_kv": inventory.has_fp8_kv,
            "num_layers": config.num_hidden_layers,
            "max_position_embeddings": config.max_position_embeddings,
        },
        "weights": [dataclasses.asdict(group) for group in inventory.groups],
        "context": question.context,
        "kv_element_bytes": question.kv_element_bytes,
        "overlap": question.overlap,
        "bandwidth": dataclasses.asdict(question.bandwidth),
        "token": _token(target, parts, question.bandwidth),
        "rows": [_rows(target, drafter, question, rows) for rows in question.rows],
        **({"drafter": _drafter(target, drafter, question)} if drafter is not None else {}),
        **({"files": _files(target)} if target.files is not None else {}),
    }


def _token(target: Target, parts: dict[str, float], bandwidth: Bandwidth) -> dict[str, Any]:
    """Bytes of one decoded token under both accountings."""
    total, narrow = counted(parts), counted(parts, SOURCE_PARTS)
    kinds = dict(zip(CLASSES, CLASSES, strict=True))
    return {
        "bytes": total,
        "ceiling_tok_per_s": bandwidth.bytes_per_s / total,
        "parts": [
            {
                "part": part,
                "formats": list(target.inventory.formats(kinds[part])) if part in kinds else [],
                "bytes": size,
                "share": size / total,
                **({"narrow_share": size / narrow} if part in SOURCE_PARTS else {}),
            }
            for part, size in parts.items()
        ],
        "narrow": {
            "parts": list(SOURCE_PARTS),
            "bytes": narrow,
            "ceiling_tok_per_s": bandwidth.bytes_per_s / narrow,
        },
    }


def _rows(target: Target, drafter: Drafter | None, question: Question, num_rows: int) -> dict[str, Any]:
    """One pass of so many rows: its bytes, its least time, and what it yields with a drafter."""
    config, speed = target.config, question.bandwidth.bytes_per_s
    one = counted(pass_bytes(config, target.inventory, question.workload(1)))
    total = counted(pass_bytes(config, target.inventory, question.workload(num_rows)))
    found = {
        "num_rows": num_rows,
        "num_distinct_experts": distinct_experts(
            config.num_experts, config.num_experts_per_tok, num_rows, question.overlap
        ),
        "bytes": total,
        "pass_ms": total / speed * 1e3,
        "relative": total / one,
    }
    if drafter is None:
        return found
    drafted = (
        draft_bytes(config, target.inventory, drafter.inventory, drafter.config) if num_rows > 1 else 0.0
    )
    length = tokens_per_step(question.rates, num_rows - 1)
    step_s = (total + drafted) / speed
    return found | {
        "step_ms": step_s * 1e3,
        "mean_acceptance_length": length,
        "break_even_length": (total + drafted) / one,
        "ceiling_tok_per_s": length / step_s,
    }


def _drafter(target: Target, drafter: Drafter, question: Question) -> dict[str, Any]:
    own = sum(group.read_bytes for group in drafter.inventory.groups)
    return {
        "name": drafter.name,
        "num_weights": drafter.inventory.num_weights(),
        "stored_bytes": drafter.inventory.stored_bytes,
        "formats": list(drafter.inventory.formats("drafter")),
        "read_bytes": draft_bytes(target.config, target.inventory, drafter.inventory, drafter.config),
        "own_read_bytes": own,
        "max_draft_tokens": drafter.config.max_draft_tokens,
        "rates": list(question.rates),
    }


def _files(target: Target) -> dict[str, Any]:
    files = target.files
    assert files is not None
    return {
        "folder": str(files.folder),
        "num_shards": len(files.shards),
        "num_tensors": len(files.header),
        "bytes": files.num_bytes,
        "problems": list(files.problems),
    }
