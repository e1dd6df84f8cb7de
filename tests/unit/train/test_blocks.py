import dataclasses

import pytest
import torch

from lean_laguna.core.drafter_config import DFlashConfig
from lean_laguna.core.dspark_config import DSparkHeads
from lean_laguna.models.dflash import DFlashDrafter
from lean_laguna.models.dspark import DSparkDrafter
from lean_laguna.train.blocks import make_blocks, sample_anchors
from lean_laguna.train.drafter_forward import block_hidden, draft_logits, proposal_rows

MASK = 12


def drafter_config(causal=True, window=5):
    return DFlashConfig.from_dict(
        {
            "architectures": ["DFlashLagunaForCausalLM"], "model_type": "laguna", "hidden_size": 16,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
            "intermediate_size": 24, "layer_types": ["sliding_attention"] * 2, "sliding_window": window,
            "gating": True, "rms_norm_eps": 1e-6, "max_position_embeddings": 64, "rope_theta": 10000.0,
            "vocab_size": 32, "draft_vocab_size": 32, "block_size": 6, "num_target_layers": 3,
            "dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": MASK, "causal": causal},
        }
    )  # fmt: skip


def test_anchors_are_sorted_distinct_and_supervised_with_a_supervised_successor():
    loss_mask = torch.zeros(3, 20, dtype=torch.bool)
    loss_mask[0, 5:15], loss_mask[1, 18:] = True, True
    loss_mask[2, 3] = True
    anchors, valid = sample_anchors(loss_mask, 8, torch.Generator().manual_seed(0))
    assert valid.sum(1).tolist() == [8, 1, 0]
    chosen = anchors[0].tolist()
    assert chosen == sorted(set(chosen))
    assert all(5 <= a <= 13 for a in chosen)
    assert anchors[1, valid[1]].tolist() == [18]


def test_anchors_depend_on_the_generator_alone():
    loss_mask = torch.ones(2, 30, dtype=torch.bool)
    first, second = (sample_anchors(loss_mask, 5, torch.Generator().manual_seed(3))[0] for _ in range(2))
    assert torch.equal(first, second)


def test_blocks_hold_anchor_masks_positions_and_labels():
    tokens = torch.arange(100, 110)[None]
    loss_mask = torch.ones(1, 10, dtype=torch.bool)
    anchors = torch.tensor([[2, 7]])
    blocks = make_blocks(tokens, loss_mask, anchors, torch.ones(1, 2, dtype=torch.bool), 4, MASK)
    assert blocks.input_ids.tolist() == [[102, MASK, MASK, MASK], [107, MASK, MASK, MASK]]
    assert blocks.positions.tolist() == [[2, 3, 4, 5], [7, 8, 9, 10]]
    assert blocks.labels[0].tolist() == [103, 104, 105]
    assert blocks.label_mask.tolist() == [[True, True, True], [True, True, False]]


def test_supervision_is_a_prefix_of_the_block_and_ends_with_the_document():
    tokens = torch.arange(10)[None]
    loss_mask = torch.ones(1, 10, dtype=torch.bool)
    loss_mask[0, 4] = False
    documents = torch.tensor([[0] * 7 + [1] * 3])
    anchors, valid = torch.tensor([[2, 5, 8]]), torch.tensor([[True, True, False]])
    blocks = make_blocks(tokens, loss_mask, anchors, valid, 5, MASK, documents)
    assert blocks.label_mask.tolist() == [
        [True, False, False, False],
        [True, False, False, False],
        [False] * 4,
    ]


@pytest.mark.parametrize("causal", [True, False])
def test_a_block_does_not_see_the_anchors_state_or_anything_later(causal):
    torch.manual_seed(0)
    drafter = DFlashDrafter(drafter_config(causal))
    drafter.init_weights(0.2)
    embedding = torch.randn(32, 16)
    tokens, aux = torch.randint(13, 32, (2, 14)), torch.randn(2, 14, 2, 16)
    anchors = torch.tensor([[3, 4, 6, 9], [2, 5, 7, 11]])  # closer than a block: blocks overlap
    valid, loss_mask = torch.ones_like(anchors, dtype=torch.bool), torch.ones(2, 14, dtype=torch.bool)

    def hidden(tokens, aux):
        blocks = make_blocks(tokens, loss_mask, anchors, valid, 6, MASK)
        return block_hidden(drafter, embedding[blocks.input_ids], aux, blocks).view(2, 4, 5, 16)

    before = hidden(tokens, aux)
    for b in range(2):
        for j in range(4):
            a = int(anchors[b, j])
            other_tokens, other_aux = tokens.clone(), aux.clone()
            other_tokens[b, a + 1 :] = 0
            other_aux[b, a:] = 7.0
            assert torch.equal(hidden(other_tokens, other_aux)[b, j], before[b, j])
            other_aux = aux.clone()
            other_aux[b, a - 1] = 7.0
            assert not torch.equal(hidden(tokens, other_aux)[b, j], before[b, j])  # the test can see a change


@pytest.mark.parametrize("is_shifted", [False, True])
@pytest.mark.parametrize("kind", ["dense", "sdpa"])
def test_a_dspark_block_depends_on_its_own_tokens_up_to_the_one_before_and_on_nothing_later(is_shifted, kind):
    torch.manual_seed(0)
    base = drafter_config(causal=False)
    config = dataclasses.replace(base, dspark=DSparkHeads(4), sample_from_anchor=is_shifted)
    drafter = DSparkDrafter(config)
    drafter.init_weights(0.2)
    torch.nn.init.normal_(drafter.markov_w2)
    embedding, head = torch.randn(32, 16), torch.randn(32, 16)
    tokens, aux = torch.randint(13, 32, (2, 16)), torch.randn(2, 16, 2, 16)
    anchors = torch.tensor([[3, 4, 6, 9], [2, 5, 7, 11]])  # closer than a block: blocks overlap
    valid, loss_mask = torch.ones_like(anchors, dtype=torch.bool), torch.ones(2, 16, dtype=torch.bool)

    def logits(tokens, aux):
        blocks = make_blocks(tokens, loss_mask, anchors, valid, 5, MASK, sample_from_anchor=is_shifted)
        hidden = block_hidden(drafter, embedding[blocks.input_ids], aux, blocks, kind)
        rows = proposal_rows(drafter, hidden, blocks.previous)
        return draft_logits(drafter, head, *rows).unflatten(0, (2, 4))

    before = logits(tokens, aux)
    num_drafts = before.shape[2]
    for b in range(2):
        for j in range(4):
            a = int(anchors[b, j])
            other_aux = aux.clone()
            other_aux[b, a:] = 7.0
            assert torch.equal(logits(tokens, other_aux)[b, j], before[b, j])
            for k in range(num_drafts):  # draft k reads tokens up to the one before it
                other = tokens.clone()
                other[b, a + k + 1 :] = 0
                assert torch.equal(logits(other, aux)[b, j, k], before[b, j, k])
                if k:
                    other[b, a + k] = 0
                    assert not torch.equal(logits(other, aux)[b, j, k], before[b, j, k])


def test_a_shifted_block_proposes_for_the_same_tokens_from_one_slot_less():
    tokens = torch.arange(100, 112)[None]
    loss_mask, anchors = torch.ones(1, 12, dtype=torch.bool), torch.tensor([[2, 7]])
    valid = torch.ones_like(anchors, dtype=torch.bool)
    plain = make_blocks(tokens, loss_mask, anchors, valid, 4, MASK)
    shifted = make_blocks(tokens, loss_mask, anchors, valid, 3, MASK, sample_from_anchor=True)
    for name in ("labels", "label_mask", "previous"):
        assert torch.equal(getattr(plain, name), getattr(shifted, name))
    assert plain.previous.tolist() == [[102, 103, 104], [107, 108, 109]]
    assert shifted.input_ids.tolist() == [[102, MASK, MASK], [107, MASK, MASK]]


def test_packed_documents_give_the_rows_of_each_alone():
    torch.manual_seed(0)
    drafter = DFlashDrafter(drafter_config())
    drafter.init_weights(0.2)
    embedding = torch.randn(32, 16)
    lengths = (9, 7)
    tokens, aux = torch.randint(13, 32, (1, 16)), torch.randn(1, 16, 2, 16)
    documents = torch.tensor([[0] * lengths[0] + [1] * lengths[1]])
    loss_mask, anchors = torch.ones(1, 16, dtype=torch.bool), torch.tensor([[2, 5, 10, 12]])
    valid = torch.ones_like(anchors, dtype=torch.bool)
    for kind in ("dense", "sdpa"):
        blocks = make_blocks(tokens, loss_mask, anchors, valid, 4, MASK, documents)
        packed = block_hidden(drafter, embedding[blocks.input_ids], aux, blocks, kind)
        alone = []
        for start, length, at in ((0, lengths[0], [2, 5]), (lengths[0], lengths[1], [1, 3])):
            part = slice(start, start + length)
            own = make_blocks(tokens[:, part], loss_mask[:, part], torch.tensor([at]), valid[:, :2], 4, MASK)
            alone.append(block_hidden(drafter, embedding[own.input_ids], aux[:, part], own, kind))
            assert torch.equal(own.label_mask, blocks.label_mask[2 * (start > 0) :][:2])
        # Sums over more masked keys, in another order.
        torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-5, atol=1e-5)


def test_a_causal_block_gives_the_same_rows_when_it_is_shorter():
    torch.manual_seed(0)
    drafter = DFlashDrafter(drafter_config(causal=True))
    drafter.init_weights(0.2)
    embedding, tokens, aux = torch.randn(32, 16), torch.randint(13, 32, (1, 14)), torch.randn(1, 14, 2, 16)
    anchors, loss_mask = torch.tensor([[3, 7]]), torch.ones(1, 14, dtype=torch.bool)
    rows = []
    for slots in (3, 6):
        blocks = make_blocks(
            tokens, loss_mask, anchors, torch.ones_like(anchors, dtype=torch.bool), slots, MASK
        )
        rows.append(block_hidden(drafter, embedding[blocks.input_ids], aux, blocks)[:, :2])
    torch.testing.assert_close(
        rows[0], rows[1], rtol=1e-5, atol=1e-6
    )  # products of other shapes, same numbers
