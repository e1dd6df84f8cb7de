"""The speculators package and ours, same weights and taps: every anchor of a sequence."""

import contextlib
import importlib.util
import sys
import types
import warnings

import pytest
import torch
from torch.nn.attention.flex_attention import or_masks

from lean_laguna.core.errors import CheckpointError
from lean_laguna.models.drafter_checkpoint import load_drafter
from support.drafters import (
    HIDDEN,
    VOCAB,
    PagedContext,
    random_rows,
    speculators_json,
    tiny_target,
)

pytestmark = pytest.mark.oracle


@contextlib.contextmanager
def training_data_packages_stubbed():
    """Let speculators be imported without the packages that only its data pipeline uses."""

    class Stub(types.ModuleType):
        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

    wanted = ["openai", "datasets", "hs_connectors"]
    stubbed = [name for name in wanted if importlib.util.find_spec(name) is None]
    if "openai" in stubbed:
        stubbed += ["openai.types", "openai.types.chat", "openai.types.completion"]
    for name in stubbed:
        sys.modules[name] = Stub(name)
        sys.modules[name].__path__ = []
    try:
        yield
    finally:
        for name in stubbed:
            del sys.modules[name]


with training_data_packages_stubbed(), warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch's own, where inductor is imported first
    import speculators
    from speculators.models.dflash import core
    from speculators.proposals.greedy import GreedyTokenProposalConfig

SIZE, LENGTH, ANCHORS = 6, 40, [1, 2, 7, 12, 13, 20, 29, 33]
WINDOW = {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": 8}


def reference_model(network=None, **changes):
    """Return a speculators drafter with random weights, embedding and head included."""
    given = speculators_json(network, **changes)
    layers = core.DFlashSpeculatorConfig.validate_transformer_config(given["transformer_layer_config"])
    layers._attn_implementation = "eager"
    verifier = speculators.VerifierConfig(name_or_path=None, architectures=["LagunaForCausalLM"])
    config = core.DFlashSpeculatorConfig(
        transformer_layer_config=layers,
        speculators_config=speculators.SpeculatorsConfig(
            algorithm="dflash",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=SIZE - 1)],
            default_proposal_method="greedy",
            verifier=verifier,
        ),
        **{
            key: given[key]
            for key in (
                "aux_hidden_state_layer_ids",
                "block_size",
                "draft_vocab_size",
                "mask_token_id",
                "sample_from_anchor",
                "sliding_window_non_causal",
            )
        },
    )
    model = core.DFlashDraftModel(config).eval()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.3 * noise if "norm" in name else noise * 1.5 / parameter.shape[-1] ** 0.5
    model.embed_tokens.weight.data = random_rows(VOCAB, HIDDEN, seed=3)
    if model.use_draft_vocab:
        words = torch.arange(model.draft_vocab_size) * 3 + 1
        t2d = torch.zeros(VOCAB, dtype=torch.bool)
        t2d[words] = True
        model.load_vocab_mappings(t2d, words - torch.arange(len(words)))
    return model


def per_query_window(
    document_ids, total_seq_len, anchor_positions, block_size, sliding_window, sliding_window_non_causal
):
    """The served window: a query sees the last ``sliding_window`` keys counted from itself.

    speculators trains with one bound for the whole block, a - W; its layers are compared under the rule
    that servers apply.
    """
    anchors = anchor_positions.repeat_interleave(block_size)

    def context(b, h, q, k):
        return (k < anchors[q]) & (anchors[q] + q % block_size - k < sliding_window)

    def block(b, h, q, k):
        own = (k >= total_seq_len) & ((k - total_seq_len) // block_size == q // block_size)
        offset = q - (k - total_seq_len)
        near = (offset < sliding_window) & (-offset < sliding_window)
        return own & near & ((offset >= 0) | sliding_window_non_causal)

    queries = len(anchor_positions) * block_size
    return or_masks(context, block), queries, total_seq_len + queries


def compare(model, folder, anchors=ANCHORS):
    """Run every anchor through both and compare hidden states, logits and greedy proposals."""
    model.save_pretrained(folder)
    drafter = load_drafter(folder, tiny_target())
    taps = random_rows(LENGTH, 3, HIDDEN, seed=4)
    tokens = torch.arange(LENGTH) * 11 % VOCAB
    loss_mask = torch.zeros(1, LENGTH)
    loss_mask[0, anchors] = 1
    hidden, logits, *_ = model._backbone_forward(
        taps.flatten(1)[None],
        tokens[None],
        loss_mask,
        random_rows(1, LENGTH, HIDDEN, seed=6),
        torch.zeros(1, LENGTH, dtype=torch.long),
        max_anchors=len(anchors),
    )
    context = PagedContext(drafter, 1, LENGTH + SIZE)
    drafter.append_context(taps, context.batch({0: (0, LENGTH)}), context.cache)
    for i, anchor in enumerate(anchors):
        ids = torch.full((SIZE,), model.mask_token_id)
        ids[0] = tokens[anchor]
        part = slice(i * SIZE, (i + 1) * SIZE)
        batch = context.batch({0: (anchor, SIZE)}, ids)
        found = drafter.propose(batch, context.cache, model.embed_tokens)
        # float32 sums in another order; hidden states have size 1, logits about 2.
        torch.testing.assert_close(found, hidden[0, part], rtol=2e-5, atol=2e-5)
        ours = drafter.compute_logits(found, lambda rows: rows @ model.lm_head.weight.T)
        proposed = logits[0, part].argmax(-1)
        if model.use_draft_vocab:
            proposed = proposed + model.d2t[proposed]
            ours_own = ours[:, torch.arange(model.draft_vocab_size) + model.d2t]
            torch.testing.assert_close(ours_own, logits[0, part], rtol=2e-5, atol=1e-4)
        else:
            torch.testing.assert_close(ours, logits[0, part], rtol=2e-5, atol=1e-4)
        assert torch.equal(ours.argmax(-1), proposed)


@torch.no_grad()
@pytest.mark.parametrize(
    ("network", "changes"),
    [
        pytest.param({}, {}, id="full"),
        pytest.param({}, {"draft_vocab_size": 20}, id="reduced vocabulary"),
        pytest.param(
            {"rope_theta": 1e6}, {"aux_hidden_state_layer_ids": [1, 2, 5]}, id="other rope and taps"
        ),
        pytest.param({**WINDOW, "sliding_window": 64}, {}, id="window not yet full"),
        pytest.param(
            {**WINDOW, "sliding_window": 64}, {"sliding_window_non_causal": True}, id="that, bidirectional"
        ),
        pytest.param({"layer_types": WINDOW["layer_types"]}, {}, id="sliding without a window"),
    ],
)
def test_hidden_states_logits_and_proposals_agree(network, changes, tmp_path):
    compare(reference_model(network, **changes), tmp_path)


@torch.no_grad()
@pytest.mark.parametrize("non_causal", [False, True])
@pytest.mark.parametrize("window", [3, 8])
@pytest.mark.parametrize("types", [["sliding_attention"] * 2, ["full_attention", "sliding_attention"]])
def test_layers_agree_under_the_served_window(types, window, non_causal, tmp_path, monkeypatch):
    network = {**WINDOW, "layer_types": types, "sliding_window": window}
    model = reference_model(network, sliding_window_non_causal=non_causal)
    trained = core.create_anchor_block_mask_mod

    def masks(**arguments):
        rule = per_query_window if arguments["sliding_window"] is not None else trained
        return rule(**arguments)

    monkeypatch.setattr(core, "create_anchor_block_mask_mod", masks)
    compare(model, tmp_path)


@torch.no_grad()
def test_the_trained_window_differs_from_the_served_one_only_past_the_edge(tmp_path):
    model = reference_model(WINDOW)
    compare(model, tmp_path, anchors=[1, 2])  # 2 + 5 - 0 < 8: all context in every query's window
    with pytest.raises(AssertionError, match="Tensor-likes are not close"):
        compare(model, tmp_path, anchors=[20])


def test_a_reduced_vocabulary_without_its_map_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    reference_model(draft_vocab_size=20).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name: value for name, value in load_file(file).items() if name != "d2t"}, file)
    with pytest.raises(CheckpointError, match=r"1 of 27 tensors are missing .*: d2t"):
        load_drafter(tmp_path, tiny_target())
