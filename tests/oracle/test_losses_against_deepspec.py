"""DeepSpec's DSpark loss, written down from its formulas, and ours on random tensors: values and gradients.

Source: DeepSpec deepspec/trainer/loss.py: weights exp(-k / 4), means of supervised slots weighted by them,
L1 over the whole vocabulary at temperature 1, the acceptance 1 - L1 / 2 as the confidence's target.
"""

import pytest
import torch
import torch.nn.functional as F

from lean_laguna.train.losses import block_loss, slot_terms
from lean_laguna.train.recipe import DrafterRecipe, LossTerms, OptimizerRecipe, SelfgenRecipe


def deepspec_loss(draft, target, labels, confidence, mask, gamma=4.0):
    weights = torch.exp(-torch.arange(mask.shape[1]) / gamma) * mask
    total = weights.sum()
    q, p = draft.float().softmax(-1), target.float().softmax(-1).detach()
    ce = -(torch.log_softmax(draft, -1).gather(-1, labels[..., None])[..., 0] * weights).sum() / total
    distance = (q - p).abs().sum(-1)
    l1 = (distance * weights).sum() / total
    wanted = (1 - 0.5 * distance.detach()).clamp(0, 1)
    guess = torch.sigmoid(confidence)
    entropy = -(wanted * guess.log() + (1 - wanted) * (1 - guess).log())
    return 0.1 * ce + 0.9 * l1 + 1.0 * (entropy * weights).sum() / total


@pytest.mark.parametrize("seed", range(3))
def test_values_and_gradients_agree(seed):
    generator = torch.Generator().manual_seed(seed)
    blocks, slots, width, vocab = 6, 5, 8, 40

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    hidden, head, teacher = random(blocks, slots, width), random(vocab, width), random(blocks, slots, width)
    guesses = random(blocks, slots)
    labels = torch.randint(vocab, (blocks, slots), generator=generator)
    mask = torch.arange(slots) < torch.randint(0, slots + 1, (blocks, 1), generator=generator)
    mask[0] = True
    terms = LossTerms(ce=0.1, l1=0.9, confidence=1.0)
    recipe = DrafterRecipe({}, OptimizerRecipe(), SelfgenRecipe(), terms=terms, loss="decay", loss_decay=4.0)
    results = []
    for is_ours in (True, False):
        rows, confidence = hidden.clone().requires_grad_(), guesses.clone().requires_grad_()
        if is_ours:
            scored = slot_terms(
                (rows,),
                labels,
                lambda r: F.linear(r, head),
                teacher,
                lambda r: F.linear(r, head),
                chunk_rows=7,
            )
            loss, _ = block_loss(scored, mask, recipe, confidence)
        else:
            loss = deepspec_loss(rows @ head.T, teacher @ head.T, labels, confidence, mask)
        loss.backward()
        results.append((loss.detach(), rows.grad, confidence.grad))
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-6)  # float32 sums in another order
