"""DSpark of the speculators package and ours: logits and losses of the same blocks, from either's files."""

import dataclasses
import warnings

import pytest
import torch
import torch.nn.functional as F

from lean_laguna.models.drafter_checkpoint import load_drafter, save_drafter
from lean_laguna.train.blocks import make_blocks
from lean_laguna.train.drafter_forward import (
    TargetStates,
    block_hidden,
    draft_logits,
    drafter_loss,
    proposal_rows,
)
from lean_laguna.train.losses import decay_weights
from lean_laguna.train.recipe import DrafterRecipe, LossTerms, OptimizerRecipe, SelfgenRecipe
from oracle.test_dflash_against_speculators import training_data_packages_stubbed
from support.drafters import DSPARK, HIDDEN, VOCAB, random_drafter, random_rows, speculators_json, tiny_target

pytestmark = pytest.mark.oracle

with training_data_packages_stubbed(), warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from speculators.losses import eager, resolve_loss_config
    from speculators.models.dspark import core

LENGTH, ANCHORS, GAMMA = 40, [1, 2, 7, 12, 13, 20, 29, 33], 4.0
EMBED, HEAD = random_rows(VOCAB, HIDDEN, seed=3), random_rows(VOCAB, HIDDEN, seed=4)
TAPS, LAST = random_rows(LENGTH, 3, HIDDEN, seed=5), random_rows(LENGTH, HIDDEN, seed=6)


def theirs(folder):
    """Load a folder with their class, plain attention, and give it the target's ends."""
    config = core.DSparkSpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = core.DSparkDraftModel.from_pretrained(folder, config=config, torch_dtype=torch.float32).eval()
    for name, value in (("embed_tokens", EMBED), ("lm_head", HEAD), ("verifier_lm_head", HEAD)):
        getattr(model, name).weight.data = value.clone()
    model.verifier_norm.weight.data = torch.ones(HIDDEN)
    return model


def likeliest_tokens():
    """Tokens that are the target's likeliest, so that both packages have the same labels."""
    normed = LAST * torch.rsqrt(LAST.pow(2).mean(-1, keepdim=True) + 1e-6)
    best = (normed @ HEAD.T).argmax(-1)
    return torch.cat([torch.tensor([3]), best[:-1]]), normed


def drafter_of(is_shifted):
    given = speculators_json(speculators_model_type="dspark", sample_from_anchor=is_shifted, **DSPARK)
    return random_drafter(given)


@pytest.mark.parametrize("is_shifted", [True, False], ids=["shifted", "fill-in"])
def test_our_files_give_their_class_our_logits_and_losses(is_shifted, tmp_path):
    drafter = drafter_of(is_shifted).requires_grad_(True)
    save_drafter(drafter, tmp_path, format="speculators")
    model = theirs(tmp_path)
    tokens, normed = likeliest_tokens()
    anchors = torch.tensor([ANCHORS])
    slots, valid = drafter.config.draft_block_size, torch.ones_like(anchors, dtype=torch.bool)
    blocks = make_blocks(
        tokens[None], torch.ones(1, LENGTH, dtype=torch.bool), anchors, valid,
        slots, drafter.config.mask_token_id, sample_from_anchor=is_shifted,
    )  # fmt: skip
    states = TargetStates(TAPS[None], normed[None])
    seen = {}
    compute = core.compute_metrics

    def note(logits, targets, confidence, mask, *args, **kwargs):
        seen.update(logits=logits, confidence=confidence, mask=mask)
        return compute(logits, targets, confidence, mask, *args, **kwargs)

    terms = LossTerms(ce=0.1, l1=0.9, confidence=1.0)
    recipe = DrafterRecipe(
        {}, OptimizerRecipe(), SelfgenRecipe(), terms=terms, loss="decay", loss_decay=GAMMA
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "compute_metrics", note)
        patch.setattr(
            "speculators.models.dflash.core.select_anchors", lambda *a: (anchors[0], torch.ones(8) > 0)
        )
        _, loss, metrics = model.forward(
            TAPS.flatten(1)[None], tokens[None], torch.ones(1, LENGTH), LAST[None],
            torch.zeros(1, LENGTH, dtype=torch.long),
            loss_config=resolve_loss_config('{"ce": 0.1, "tv": 1.8}', "eager"), tv_loss_fn=eager.tv_loss,
            gamma=GAMMA, max_anchors=len(ANCHORS),
        )  # fmt: skip
    hidden = block_hidden(drafter, EMBED[blocks.input_ids], TAPS[None], blocks)
    rows = proposal_rows(drafter, hidden, blocks.previous)
    ours = draft_logits(drafter, HEAD, *rows)
    first = drafter.config.first_slot
    # float32 sums in another order; logits are about 6.
    torch.testing.assert_close(
        ours, seen["logits"].view(len(ANCHORS), slots, -1)[:, first:], rtol=2e-5, atol=2e-4
    )
    confidence = drafter.confidence_logits(*rows)
    torch.testing.assert_close(
        confidence, seen["confidence"].view(len(ANCHORS), slots)[:, first:], rtol=2e-5, atol=1e-4
    )
    found, parts, _ = drafter_loss(drafter, HEAD, EMBED[blocks.input_ids], states, blocks, recipe)
    # Ours divides by the sum of the weights, theirs by the number of slots.
    weights = decay_weights(blocks.labels.shape[1], GAMMA).expand(blocks.label_mask.shape)
    scale = (weights * blocks.label_mask).sum() / blocks.label_mask.sum()
    torch.testing.assert_close(found * scale, loss, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(parts["l1"] * scale, 2 * metrics["tv_loss_sum"], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        parts["confidence"] * scale, metrics["confidence_loss_sum"], rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("is_shifted", [True, False], ids=["shifted", "fill-in"])
def test_their_files_are_read_as_they_were_meant(is_shifted, tmp_path):
    drafter = drafter_of(is_shifted)
    save_drafter(drafter, tmp_path / "a", format="speculators")
    theirs(tmp_path / "a").save_pretrained(tmp_path / "b")
    again = load_drafter(tmp_path / "b", tiny_target())
    assert dataclasses.replace(again.config, num_target_layers=None) == dataclasses.replace(
        drafter.config, num_target_layers=None
    )
    for (name, mine), other in zip(drafter.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(mine, other), name
    assert F.embedding(torch.tensor(3), again.markov_w1).shape == (4,)
