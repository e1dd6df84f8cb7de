"""Requests and their rows as a block of state says them, and how many fit one launch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lean_laguna.core.types import SamplingParams
from lean_laguna.engine.gpu_state import MAX_STOPS, RING
from lean_laguna.engine.sequence import SequenceState
from lean_laguna.kernels.triton.filters import MAX_TOP_K


def split_rows(num_drafts: Sequence[int], most_rows: int) -> list[range]:
    """Cut requests with so many drafts each into launches of at most ``most_rows`` rows, in order."""
    cuts, start, rows = [], 0, 0
    for i, drafts in enumerate(num_drafts):
        if rows + 1 + drafts > most_rows:
            cuts.append(range(start, i))
            start, rows = i, 0
        rows += 1 + drafts
    if num_drafts:
        cuts.append(range(start, len(num_drafts)))
    return cuts


def lay_out(
    fields: dict[str, NDArray[Any]],
    sequences: Sequence[SequenceState],
    num_drafts: Sequence[int],
    mask_token: int,
) -> None:
    """Write the rows and requests of decoding sequences into a host block of zeros.

    Args:
        fields: ``Block.arrays``.
        sequences: At most as many rows in all as a launch takes.
        num_drafts: Of each; what its request can still say caps them.
        mask_token: Stands where a draft is to come.
    """
    row = 0
    fields["stop_ids"][:] = -1
    for entry, (sequence, drafts) in enumerate(zip(sequences, num_drafts, strict=True)):
        remaining = sequence.completion.num_remaining
        count = 1 + min(drafts, remaining - 1)
        rows = slice(row, row + count)
        write_request(fields, entry, sequence, drafts)
        fields["input_ids"][rows] = mask_token
        fields["input_ids"][row] = sequence.completion.token_ids[-1]
        fields["positions"][rows] = np.arange(sequence.num_computed, sequence.num_computed + count)
        fields["row_request"][rows] = entry
        fields["row_start"][entry], fields["row_count"][entry] = row, count
        fields["row_seeds"][rows] = fields["seeds"][entry]
        fields["row_temperatures"][rows] = fields["temperatures"][entry]
        row += count
    fields["num_rows"][0], fields["num_requests"][0] = row, len(sequences)


def write_request(
    fields: dict[str, NDArray[Any]], entry: int, sequence: SequenceState, num_drafts: int
) -> None:
    """Write what a step needs to know of one request besides its rows."""
    params = sequence.request.params
    fields["seeds"].view(np.uint64)[entry] = sequence.sampling.seed
    fields["temperatures"][entry] = params.temperature
    fields["remaining"][entry] = sequence.completion.num_remaining
    fields["num_drafts"][entry] = num_drafts
    write_filters(fields, entry, params)
    stops = list(params.stop_token_ids)
    if not params.ignore_eos:
        stops += sequence.sampling.eos_token_ids
    stops = [token for token in stops if 0 <= token < sequence.sampling.vocab_size]
    # A longer list is the host's to watch: what the device says beyond the end is dropped.
    if len(stops) <= MAX_STOPS:
        fields["stop_ids"][entry, : len(stops)] = stops


def write_filters(fields: dict[str, NDArray[Any]], entry: int, params: SamplingParams) -> None:
    """Write a request's top_k, top_p and min_p; nothing where the host applies them."""
    if filters_on_device(params):
        fields["top_k"][entry], fields["top_p"][entry] = params.top_k, params.top_p
        fields["log_min_p"][entry] = math.log(params.min_p) if params.min_p > 0 else -math.inf


def filters_on_device(params: SamplingParams) -> bool:
    """Say whether a request samples from its most probable tokens, few enough for the device."""
    return params.temperature > 0 and 0 < params.top_k <= MAX_TOP_K


def has_filters(sequences: Iterable[SequenceState]) -> bool:
    """Say whether the device filters the tokens of any of them."""
    return any(filters_on_device(sequence.request.params) for sequence in sequences)


def chances_made(fields: dict[str, NDArray[Any]], entry_cuts: Sequence[int]) -> list[tuple[float, ...]]:
    """Return the chances of each request's drafts as they were laid out, before any was cut.

    One that was not made, of chance -1, counts as likely as the one before it.

    Args:
        fields: ``Block.arrays`` after a step.
        entry_cuts: Drafts of each request that were laid out in that step and not sent.
    """
    found, row = [], 0
    for entry, cut in enumerate(entry_cuts):
        rows = int(fields["row_count"][entry]) + cut
        own, last = [], 1.0
        for chance in fields["chances"][row + 1 : row + rows].tolist():
            last = chance if chance >= 0 else last
            own.append(last)
        found.append(tuple(own))
        row += rows
    return found


def tokens_said(fields: dict[str, NDArray[Any]], entry: int, before: int) -> list[int]:
    """Return the tokens that a request said after its first ``before``."""
    now = int(fields["emitted"][entry])
    said: list[int] = [int(fields["ring"][entry, i % RING]) for i in range(before, now)]
    return said
