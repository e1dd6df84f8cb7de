"""Acceptance of a drafter, measured at every position of held-out text that its target wrote."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from lean_laguna.models.dflash import DFlashDrafter
from lean_laguna.models.dspark import DSparkDrafter
from lean_laguna.models.laguna import LagunaForCausalLM
from lean_laguna.train.blocks import make_blocks
from lean_laguna.train.documents import Document, last_answer
from lean_laguna.train.drafter_forward import block_hidden, capture, draft_logits, proposal_rows
from lean_laguna.train.generated import Generated
from lean_laguna.train.metrics import (
    accepted_lengths,
    chain_counts,
    conditional_accuracy,
    distinct_ngram_share,
    expected_acceptance_length,
    position_accuracy,
    run_lengths,
    tau_chain,
)

OTHER_DRAFT_LENGTHS = (3, 15)


@torch.no_grad()
def evaluate(
    drafter: DFlashDrafter, target: LagunaForCausalLM, text: Generated, num_draft_tokens: int, rows: int = 16
) -> dict[str, float]:
    """Measure acceptance at every position of held-out text written by the target.

    A draft is accepted when it equals the text's token: the target's argmax for greedy text, its sample
    otherwise; the drafter then samples with the same noise, as the engine does.

    Args:
        drafter: The network.
        target: Its target.
        text: Sequences with their noise, all of one kind and one prefix length.
        num_draft_tokens: G.
        rows: Sequences at once.

    Returns:
        tau_chain, eal, pos_acc_k and cond_acc_k for k = 1..G, distinct 8-gram share.
    """
    prefix = int(text.prefix_lengths[0])
    written = text.tokens.shape[1] - prefix
    lengths, corrects, masks = [], [], []
    for start in range(0, len(text.tokens), rows):
        stop = min(start + rows, len(text.tokens))
        correct, mask = correct_slots(drafter, target, text, start, stop, num_draft_tokens)
        lengths.append(accepted_lengths(correct, mask).view(-1, written))
        corrects.append(correct)
        masks.append(mask)
    accepted, correct, mask = torch.cat(lengths), torch.cat(corrects), torch.cat(masks)
    full = mask.all(dim=1)  # anchors too near the end would understate L
    result = {
        "tau_chain": tau_chain(accepted, 0, written),
        "eal": expected_acceptance_length(accepted_lengths(correct[full])),
        "distinct_8gram": distinct_ngram_share(text.tokens[:, prefix:]),
    }
    by_slot = zip(position_accuracy(correct, mask), conditional_accuracy(correct, mask), strict=True)
    for k, (pos, cond) in enumerate(by_slot, 1):
        result[f"pos_acc_{k}"], result[f"cond_acc_{k}"] = pos, cond
    return result


@torch.no_grad()
def evaluate_documents(
    drafter: DFlashDrafter, target: LagunaForCausalLM, documents: Sequence[Document], num_draft_tokens: int
) -> dict[str, float]:
    """Measure acceptance on the last answers of documents, walked as serving walks.

    A draft is drawn with the engine's own noise where the document tells its seed; of other sampled answers
    the drafter's likeliest token is held against the text.

    Args:
        drafter: The network.
        target: Its target.
        documents: At least one, in each of which the target wrote something. Of an answer that stopped by
            itself the last step is counted as served where :func:`said_on` was asked for what follows.
        num_draft_tokens: G.

    Returns:
        documents_tau_chain, and acc_k for k = 1..G.
    """
    cycles = drafts = 0
    correct, masks = [], []
    for document in documents:
        text = document_text(document, target)
        written = text.tokens.shape[1] - int(text.prefix_lengths[0])
        beyond = document.beyond
        if beyond is not None:
            text = replace(text, tokens=torch.cat([text.tokens, beyond[None].to(text.tokens)], dim=1))
        right, mask = correct_slots(drafter, target, text, 0, 1, num_draft_tokens)
        lengths = accepted_lengths(right, mask).tolist()
        walked = chain_counts(lengths, 0, written, is_stopped=beyond is not None)
        cycles, drafts = cycles + walked[0], drafts + walked[1]
        correct.append(right[: written - 1])  # the last token is no anchor, nor is what follows it
        masks.append(mask[: written - 1])
    result = {"documents_tau_chain": 1.0 + drafts / max(1, cycles)}
    accuracy = position_accuracy(torch.cat(correct), torch.cat(masks))
    return result | {f"documents_acc_{k}": value for k, value in enumerate(accuracy, 1)}


def document_text(document: Document, target: LagunaForCausalLM) -> Generated:
    """Return a document's last answer as text to evaluate on; greedy where its noise is not known.

    What follows the answer, such as a template's line break after a turn, is left out.
    """
    prefix, end = last_answer(document)
    known = document.seed is not None and document.temperature is not None
    return Generated(
        document.tokens[None, :end].to(target.lm_head.weight.device),
        torch.tensor([prefix]),
        (document.temperature or 0.0) if known else 0.0,
        0,
        target.config.vocab_size,
        document.seed if known else None,
    )


@torch.no_grad()
def said_on(document: Document, target: LagunaForCausalLM, num_tokens: int) -> Document:
    """Return a document with what its target would have said past an answer that stopped by itself.

    Serving drafts past such an end, which it learns of only then, and counts what the target agrees to.

    Args:
        document: One of another end, or with text after its last answer, is returned as it is.
        target: Its target.
        num_tokens: As many as there are drafts a step.
    """
    if not (document.is_stopped and bool(document.written[-1])):
        return document
    text = document_text(document, target)
    end = text.tokens.shape[1]
    tokens = F.pad(text.tokens.long(), (0, num_tokens))
    noise = replace(text, tokens=tokens).noise(0, 1)[0] if text.temperature > 0 else None
    for place in range(end, end + num_tokens):
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
            hidden = target.forward_dense(tokens[:, :place], attention="sdpa").hidden_states[0, -1]
            logits = F.linear(hidden, target.lm_head.weight).float()
        tokens[0, place] = (logits if noise is None else logits + text.temperature * noise[place]).argmax()
    return replace(document, beyond=tokens[0, end:].int().cpu())


@torch.no_grad()
def evaluate_argmax(
    target: LagunaForCausalLM, text: Generated, num_draft_tokens: int, rows: int = 16
) -> dict[str, float]:
    """Measure the target's own argmax as the drafter: the ceiling of drafters blind to the noise.

    On greedy text this ceiling is G + 1 by definition. On sampled text a drafter that draws with the
    verifier's noise, as ours does, may pass it; its own ceiling is G + 1 again.

    Args:
        target: The target, which wrote the text.
        text: Sequences of one prefix length.
        num_draft_tokens: G.
        rows: Sequences at once.

    Returns:
        tau_chain, and match, the share of the text's tokens that are the argmax.
    """
    prefix = int(text.prefix_lengths[0])
    matches = []
    for start in range(0, len(text.tokens), rows):
        tokens = text.tokens[start : start + rows].long()
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
            hidden = target.forward_dense(tokens, attention="sdpa").hidden_states[:, prefix:-1]
            logits = F.linear(hidden, target.lm_head.weight).float()
        matches.append(logits.argmax(-1) == tokens[:, prefix + 1 :])
    match = torch.cat(matches)
    accepted = F.pad(run_lengths(match, num_draft_tokens), (0, 1))  # nothing follows the last token
    return {
        "tau_chain": tau_chain(accepted, 0, accepted.shape[1]),
        "match": float(match.double().mean()),
    }


def evaluate_kinds(
    drafter: DFlashDrafter,
    target: LagunaForCausalLM,
    held_out: dict[str, Generated],
    num_draft_tokens: int,
    rows: int = 16,
) -> dict[str, float]:
    """Return :func:`evaluate` of each kind of text, each figure under ``KIND_NAME``.

    Args:
        drafter: The network.
        target: Its target.
        held_out: Evaluation text by kind, ``greedy`` and ``sampled``.
        num_draft_tokens: G.
        rows: Sequences at once.
    """
    found: dict[str, float] = {}
    for kind, text in held_out.items():
        figures = evaluate(drafter, target, text, num_draft_tokens, rows)
        found |= {f"{kind}_{name}": value for name, value in figures.items()}
    return found


def evaluate_further(
    drafter: DFlashDrafter,
    target: LagunaForCausalLM,
    held_out: dict[str, Generated],
    num_draft_tokens: int,
    rows: int = 16,
) -> dict[str, float]:
    """Return what stands beside :func:`evaluate_kinds`: tau_chain at other draft lengths, and the ceiling.

    Args:
        drafter: The network.
        target: Its target.
        held_out: Evaluation text by kind.
        num_draft_tokens: G of the ceiling.
        rows: Sequences at once.
    """
    found: dict[str, float] = {}
    for kind, text in held_out.items():
        for length in OTHER_DRAFT_LENGTHS:
            if length <= drafter.config.max_draft_tokens and length != num_draft_tokens:
                figures = evaluate(drafter, target, text, length, rows)
                found[f"{kind}_tau_chain_at_{length}"] = figures["tau_chain"]
        if text.temperature > 0:
            ceiling = evaluate_argmax(target, text, num_draft_tokens, rows)
            found |= {f"{kind}_argmax_ceiling_{name}": value for name, value in ceiling.items()}
    return found


@dataclass(frozen=True)
class SlotOutcomes:
    """What became of every proposal, N = sequences x written tokens.

    A slot's proposal follows the text's tokens, not the drafts before it: as far as drafts are accepted the
    two are the same, and what follows a rejected draft does not count.

    Attributes:
        correct: [N, G] bool, the proposal is the text's token.
        mask: [N, G] bool, the slot has a token to be compared with.
        confidence: [N, G] float32 logits of the confidence head, or None.
    """

    correct: Tensor
    mask: Tensor
    confidence: Tensor | None


def correct_slots(
    drafter: DFlashDrafter,
    target: LagunaForCausalLM,
    text: Generated,
    start: int,
    stop: int,
    num_draft_tokens: int,
) -> tuple[Tensor, Tensor]:
    """Return ``correct`` and ``mask``, [N, G] bool each, of :func:`slot_outcomes`."""
    outcomes = slot_outcomes(drafter, target, text, start, stop, num_draft_tokens)
    return outcomes.correct, outcomes.mask


def slot_outcomes(
    drafter: DFlashDrafter,
    target: LagunaForCausalLM,
    text: Generated,
    start: int,
    stop: int,
    num_draft_tokens: int,
) -> SlotOutcomes:
    """Propose at every written position of sequences start..stop and compare with the text."""
    tokens = text.tokens[start:stop].long()
    device, prefix = tokens.device, int(text.prefix_lengths[0])
    config = drafter.config
    loss_mask = text.written_mask(slice(start, stop)).to(device)
    anchors = torch.arange(prefix, tokens.shape[1], device=device).expand(len(tokens), -1).contiguous()
    blocks = make_blocks(
        tokens, loss_mask, anchors, torch.ones_like(anchors, dtype=torch.bool),
        num_draft_tokens + config.first_slot, config.mask_token_id,
        sample_from_anchor=config.sample_from_anchor,
    )  # fmt: skip
    states = capture(target, tokens, config.target_layer_ids)
    confidence = None
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        hidden = block_hidden(drafter, target.embed(blocks.input_ids), states.taps, blocks)
        rows = proposal_rows(drafter, hidden, blocks.previous)
        logits = draft_logits(drafter, target.lm_head.weight, *rows).flatten(0, 1).float()
        if isinstance(drafter, DSparkDrafter) and drafter.confidence_weight is not None:
            confidence = drafter.confidence_logits(*rows).float()
    if text.temperature > 0:
        # By the position the drafted token would stand at: the noise its target token was chosen with.
        noise = text.noise(start, stop)  # [B, S, V]
        at = blocks.anchors.view(-1, 1) + 1 + torch.arange(num_draft_tokens, device=device)
        at = at.clamp(max=tokens.shape[1] - 1)
        sequence = torch.arange(len(tokens), device=device).repeat_interleave(anchors.shape[1])[:, None]
        logits = logits + text.temperature * noise[sequence, at].flatten(0, 1)
    correct = logits.argmax(-1).view_as(blocks.labels) == blocks.labels
    return SlotOutcomes(correct & blocks.label_mask, blocks.label_mask, confidence)
