"""Calibrating a DSpark drafter's confidences on held-out text, walked as serving walks.

Half of the sequences fit the temperatures, the other half says how far they can be believed.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lean_laguna.models.dspark import DSparkDrafter
from lean_laguna.models.laguna import LagunaForCausalLM
from lean_laguna.spec.confidence import fit_temperatures, survival_error
from lean_laguna.train.drafter_eval import slot_outcomes
from lean_laguna.train.generated import Generated
from lean_laguna.train.metrics import accepted_lengths


@torch.no_grad()
def calibrate(
    drafter: DSparkDrafter,
    target: LagunaForCausalLM,
    held_out: dict[str, Generated],
    num_report: int = 7,
    rows: int = 16,
) -> dict[str, float]:
    """Fit the drafter's temperatures, in place, for greedy and for sampled requests.

    Args:
        drafter: With a confidence head; its config is replaced.
        target: Its target.
        held_out: Text by ``greedy`` and ``sampled``, of two sequences at least.
        num_report: Positions whose error is averaged.
        rows: Sequences at once.

    Returns:
        Per kind, the calibration error of survival on the other half of the text, before and after, mean over
        positions and the largest.
    """
    figures: dict[str, float] = {}
    heads = drafter.heads
    for kind, text in held_out.items():
        logits, accepted, sequence = visited_blocks(drafter, target, text, rows)
        is_fit = sequence % 2 == 0
        found = fit_temperatures(logits[is_fit], accepted[is_fit])
        kept = tuple(round(value, 4) for value in found)
        heads = (
            replace(heads, greedy_temperatures=kept)
            if text.temperature == 0
            else replace(heads, sampled_temperatures=kept)
        )
        for name, temperatures in (("before", ()), ("after", kept)):
            errors = survival_error(logits[~is_fit], accepted[~is_fit], temperatures)[:num_report]
            figures[f"{kind}_ece_{name}"] = sum(errors) / len(errors)
            figures[f"{kind}_ece_{name}_max"] = max(errors)
    drafter.set_heads(heads)
    return figures


def visited_blocks(
    drafter: DSparkDrafter, target: LagunaForCausalLM, text: Generated, rows: int = 16
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the blocks that serving meets: logits [N, G], accepted drafts [N] and sequence [N], on the CPU.

    Blocks whose drafts would pass the text's end are left out.
    """
    num_drafts = drafter.config.max_draft_tokens
    written = text.tokens.shape[1] - int(text.prefix_lengths[0])
    num_drafts = min(num_drafts, max(1, written // 2))
    logits, accepted, owners = [], [], []
    for start in range(0, len(text.tokens), rows):
        stop = min(start + rows, len(text.tokens))
        outcomes = slot_outcomes(drafter, target, text, start, stop, num_drafts)
        assert outcomes.confidence is not None
        lengths = accepted_lengths(outcomes.correct, outcomes.mask).view(-1, written).tolist()
        confidence = outcomes.confidence.view(-1, written, num_drafts).cpu()
        for index, row in enumerate(lengths):
            anchor = 0
            places = []
            while anchor + num_drafts < written:
                places.append(anchor)
                anchor += row[anchor] + 1
            logits.append(confidence[index, places])
            accepted += [row[place] for place in places]
            owners += [start + index] * len(places)
    return torch.cat(logits), torch.tensor(accepted), torch.tensor(owners)
