"""Calibrating a DSpark drafter's confidences on held-out text, walked as serving walks.

Walked with as many drafts as serving sends: where more are sent, an easy stretch is one block instead of
several, and counts less. A fit on blocks of 15 promises too little of blocks of 7.
All sequences fit it; how far it can be believed is said by fits on half of them, about the other half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from lean_laguna.core.dspark_config import DSparkHeads
from lean_laguna.models.drafter_checkpoint import save_drafter
from lean_laguna.models.dspark import DSparkDrafter
from lean_laguna.models.laguna import LagunaForCausalLM
from lean_laguna.spec.confidence import Calibration, fit_and_check, survival_error
from lean_laguna.train.documents import Document
from lean_laguna.train.drafter_eval import document_text, slot_outcomes
from lean_laguna.train.generated import Generated
from lean_laguna.train.metrics import accepted_lengths

SERVED_DRAFTS = 7


@torch.no_grad()
def calibrate(
    drafter: DSparkDrafter,
    target: LagunaForCausalLM,
    held_out: dict[str, Generated],
    num_served: int = SERVED_DRAFTS,
    rows: int = 16,
) -> dict[str, float]:
    """Fit the drafter's temperatures, in place, for greedy and for sampled requests.

    Args:
        drafter: With a confidence head; its config is replaced.
        target: Its target.
        held_out: Text by ``greedy`` and ``sampled``, of two sequences at least.
        num_served: Drafts sent a block, the positions whose error is averaged.
        rows: Sequences at once.

    Returns:
        Per kind, the calibration error of survival before and after, mean over positions and the largest;
        after, each half of the text is predicted by a fit on the other.
    """
    figures: dict[str, float] = {}
    heads = drafter.heads
    for kind, text in held_out.items():
        logits, accepted, sequence = visited_blocks(drafter, target, text, num_served, rows)
        found, chances = fit_and_check(logits, accepted, sequence)
        heads = with_calibration(heads, found, is_greedy=text.temperature == 0)
        for name, survival in (("before", Calibration().survival(logits)), ("after", chances)):
            errors = survival_error(survival, accepted)[:num_served]
            figures[f"{kind}_ece_{name}"] = sum(errors) / len(errors)
            figures[f"{kind}_ece_{name}_max"] = max(errors)
    drafter.set_heads(heads)
    return figures


@torch.no_grad()
def calibrate_documents(
    drafter: DSparkDrafter,
    target: LagunaForCausalLM,
    documents: Sequence[Document],
    out: Path,
    provenance: dict[str, str],
) -> dict[str, float]:
    """Fit the temperatures of the kind of request that the documents are, and write the drafter anew.

    Args:
        drafter: With a confidence head.
        target: Its target.
        documents: Held out; those without a seed of the engine's noise count as greedy.
        out: The drafter's folder.
        provenance: For its config.

    Returns:
        The calibration error before and after, as :func:`calibrate` measures it.
    """
    logits, accepted, owners = [], [], []
    for index, document in enumerate(documents):
        text = document_text(document, target)
        blocks = visited_blocks(drafter, target, text)
        logits.append(blocks[0])
        accepted.append(blocks[1])
        owners.append(torch.full_like(blocks[2], index))
    every, lengths, owner = torch.cat(logits), torch.cat(accepted), torch.cat(owners)
    if not len(every):
        return {}
    found, chances = fit_and_check(every, lengths, owner)
    is_sampled = any(document.seed is not None and document.temperature for document in documents)
    drafter.set_heads(with_calibration(drafter.heads, found, is_greedy=not is_sampled))
    save_drafter(drafter, out, format=drafter.config.format, dtype=torch.bfloat16, provenance=provenance)
    before, after = (
        survival_error(part, lengths)[:SERVED_DRAFTS] for part in (Calibration().survival(every), chances)
    )
    return {"ece_before": sum(before) / len(before), "ece_after": sum(after) / len(after)}


def with_calibration(heads: DSparkHeads, found: Calibration, *, is_greedy: bool) -> DSparkHeads:
    """Return heads with the calibration of one kind of request replaced."""
    if is_greedy:
        return replace(heads, greedy_temperatures=found.temperatures, greedy_biases=found.biases)
    return replace(heads, sampled_temperatures=found.temperatures, sampled_biases=found.biases)


def visited_blocks(
    drafter: DSparkDrafter,
    target: LagunaForCausalLM,
    text: Generated,
    num_served: int = SERVED_DRAFTS,
    rows: int = 16,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the blocks that serving meets: :func:`walk` over :func:`score_anchors`."""
    return walk(*score_anchors(drafter, target, text, rows), num_served)


@torch.no_grad()
def score_anchors(
    drafter: DSparkDrafter, target: LagunaForCausalLM, text: Generated, rows: int = 16
) -> tuple[Tensor, Tensor]:
    """Return confidence logits [M, W, G] and accepted drafts [M, W] at every written token, on the CPU."""
    num_drafts = drafter.config.max_draft_tokens
    written = text.tokens.shape[1] - int(text.prefix_lengths[0])
    logits, accepted = [], []
    for start in range(0, len(text.tokens), rows):
        stop = min(start + rows, len(text.tokens))
        outcomes = slot_outcomes(drafter, target, text, start, stop, num_drafts)
        assert outcomes.confidence is not None
        logits.append(outcomes.confidence.view(-1, written, num_drafts).cpu())
        accepted.append(accepted_lengths(outcomes.correct, outcomes.mask).view(-1, written).cpu())
    return torch.cat(logits), torch.cat(accepted)


def walk(logits: Tensor, accepted: Tensor, num_served: int) -> tuple[Tensor, Tensor, Tensor]:
    """Visit anchors as serving does.

    Args:
        logits: [M, W, G] at every written token.
        accepted: [M, W] int64, of G drafts.
        num_served: Drafts sent a block.

    Returns:
        Logits [N, G], accepted drafts [N], of G though fewer are sent, and sequence [N]. Blocks whose G
        drafts would pass the text's end are left out.
    """
    _, written, num_drafts = logits.shape
    sequences, places = [], []
    for index, row in enumerate(accepted.tolist()):
        anchor = 0
        while anchor + num_drafts < written:
            sequences.append(index)
            places.append(anchor)
            anchor += min(row[anchor], num_served) + 1
    owners, at = torch.tensor(sequences, dtype=torch.int64), torch.tensor(places, dtype=torch.int64)
    return logits[owners, at], accepted[owners, at], owners
