"""Result files: one JSON object per run, with everything needed to believe it and to run it again."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping
from typing import Any, Literal

from lean_laguna.bench.rounds import Plan
from lean_laguna.core.memory import peak_rss_bytes
from lean_laguna.core.provenance import describe_run
from lean_laguna.core.types import SamplingParams

SCHEMA_VERSION = 1
RunKind = Literal["ab", "sweep", "parity"]


def describe(
    kind: RunKind,
    plan: Plan,
    measured: Mapping[str, Any],
    *,
    engines: Mapping[str, Mapping[str, Any]],
    argv: list[str] | None = None,
) -> dict[str, Any]:
    """Return the content of a result file.

    Args:
        kind: What was run.
        plan: Prompts, parameters, repeats.
        measured: The run's own part.
        engines: ``Backend.info()`` of each side.
        argv: The command line; None takes this process's.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": kind,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **describe_run(argv),
        # Random weights, or drafts that stand by a draw: times mean something, outputs do not.
        "synthetic": any(bool(info.get("synthetic")) for info in engines.values()),
        "engines": {name: dict(info) for name, info in engines.items()},
        "prompts": {
            "name": plan.prompts.name,
            "num_prompts": len(plan.prompts.prompts),
            "sha256": plan.prompts.sha256,
        },
        "sampling": changed_params(plan.params),
        "seed": plan.seed,
        "repeats": plan.repeats,
        "warmup": plan.warmup,
        "process_peak_rss_bytes": peak_rss_bytes(),
        **measured,
    }


def changed_params(params: SamplingParams) -> dict[str, Any]:
    """Return temperature, limit, and whatever else differs from the defaults."""
    default = SamplingParams()
    shown: dict[str, Any] = {"temperature": params.temperature, "max_tokens": params.max_tokens}
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if value != getattr(default, field.name):
            shown[field.name] = list(value) if isinstance(value, tuple) else value
    return shown
