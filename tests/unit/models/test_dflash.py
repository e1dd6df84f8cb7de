import json

import pytest
import torch
from safetensors.torch import load_file

from lean_laguna.core.drafter_config import DFlashConfig
from lean_laguna.models.dflash import DFlashDrafter
from lean_laguna.models.drafter_checkpoint import save_drafter
from support.drafters import (
    HIDDEN,
    VOCAB,
    PagedContext,
    dense_laguna,
    laguna_json,
    random_drafter,
    random_rows,
    speculators_json,
    zlab_json,
)

# float32 sums of at most a hundred terms, through two layers; hidden values have size 1.
CLOSE = {"rtol": 2e-5, "atol": 2e-5}
EMBEDDING = random_rows(VOCAB, HIDDEN, seed=3)
SHAPES = [
    pytest.param({"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}, True, id="window causal"),
    pytest.param(
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}, False, id="window both ways"
    ),
    pytest.param(
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 3}, True, id="window below block"
    ),
    pytest.param(
        {"layer_types": ["sliding_attention"] * 2, "sliding_window": 3}, False, id="that, both ways"
    ),
    pytest.param({"layer_types": ["full_attention"] * 2}, False, id="full both ways"),
    pytest.param({"layer_types": ["full_attention"] * 2}, True, id="full causal"),
]


def embed(ids):
    return EMBEDDING[ids]


def native(causal, **changes):
    dflash = {"target_layer_ids": [1, 3, 5], "mask_token_id": 12, "causal": causal}
    return laguna_json(dflash_config=dflash, **changes)


def taps(*shape, seed=4):
    return random_rows(*shape, 3, HIDDEN, seed=seed)


def saved(drafter, folder):
    save_drafter(drafter, folder)
    config = json.loads((folder / "config.json").read_text())
    return load_file(folder / "model.safetensors"), config


def propose(drafter, context, rows, ids):
    return drafter.propose(context.batch(rows, ids), context.cache, embed)


@pytest.mark.parametrize(("changes", "causal"), SHAPES)
def test_blocks_of_several_requests_equal_a_dense_network(changes, causal, tmp_path):
    drafter = random_drafter(native(causal, **changes))
    tensors, config = saved(drafter, tmp_path)
    context = PagedContext(drafter, 3, 60)
    aux, lengths = taps(3, 60), [7, 13, 30]
    rows = torch.cat([aux[r, :n] for r, n in enumerate(lengths)])
    drafter.append_context(rows, context.batch({r: (0, n) for r, n in enumerate(lengths)}), context.cache)
    ids = torch.arange(11) * 5 % VOCAB
    batch = context.batch({0: (7, 6), 2: (30, 2), 1: (13, 3)}, ids)
    hidden = drafter.propose(batch, context.cache, embed)
    for span, request in zip(batch.spans, (0, 2, 1), strict=True):
        part = slice(span.start, span.start + span.num_rows)
        expected = dense_laguna(tensors, config, aux[request, : lengths[request]], EMBEDDING[ids[part]])
        torch.testing.assert_close(hidden[part], expected, **CLOSE)


@pytest.mark.parametrize(("changes", "causal"), SHAPES)
def test_rounds_with_rejections_see_committed_positions_only(changes, causal, tmp_path):
    drafter = random_drafter(native(causal, **changes))
    tensors, config = saved(drafter, tmp_path)
    context = PagedContext(drafter, 1, 60)
    committed = taps(60)
    position, window = 5, drafter.config.window
    drafter.append_context(committed[:position], context.batch({0: (0, position)}), context.cache)
    for turn, accepted in enumerate([0, 4, 2, 5, 0, 0, 5, 3, 1, 5]):
        if window is not None:
            context.forget_before(0, max(0, position - window + 1))
        ids = (torch.arange(6) * 7 + turn) % VOCAB
        hidden = propose(drafter, context, {0: (position, 6)}, ids)
        expected = dense_laguna(tensors, config, committed[:position], EMBEDDING[ids])
        torch.testing.assert_close(hidden, expected, **CLOSE)
        # The verified rows: anchor and accepted drafts keep their taps, rejected ones leave others behind.
        verified = taps(6, seed=100 + turn)
        verified[: accepted + 1] = committed[position : position + accepted + 1]
        drafter.append_context(verified, context.batch({0: (position, 6)}), context.cache)
        position += accepted + 1


@pytest.mark.parametrize("gating", ["per-head", "per-element", False])
def test_the_gate_follows_the_config(gating, tmp_path):
    drafter = random_drafter(native(True, gating=gating))
    gate = drafter.layers[0].self_attn.g_proj
    assert (gate is None) == (gating is False)
    if gating == "per-head":
        tensors, config = saved(drafter, tmp_path)
        gate_free = {name: tensor * 0 if "g_proj" in name else tensor for name, tensor in tensors.items()}
        plain = dense_laguna(gate_free, config, taps(9), EMBEDDING[:6])
        assert not torch.allclose(plain, dense_laguna(tensors, config, taps(9), EMBEDDING[:6]), atol=1e-2)


def test_a_context_that_begins_later_equals_a_dense_network_without_the_earlier_positions(tmp_path):
    drafter = random_drafter(native(False, layer_types=["full_attention"] * 2))
    tensors, config = saved(drafter, tmp_path)
    context = PagedContext(drafter, 1, 40)
    context.forget_before(0, 12)
    aux = taps(20)
    drafter.append_context(aux, context.batch({0: (0, 20)}), context.cache)
    hidden = propose(drafter, context, {0: (20, 4)}, torch.arange(4))
    expected = dense_laguna(tensors, config, aux[12:], EMBEDDING[:4], first_context=12)
    torch.testing.assert_close(hidden, expected, **CLOSE)


@pytest.mark.parametrize(("changes", "causal"), SHAPES)
def test_unwritten_pages_never_leak(changes, causal):
    drafter = random_drafter(native(causal, **changes))
    clean, dirty = PagedContext(drafter, 2, 40), PagedContext(drafter, 2, 40, fill=float("nan"))
    outs = []
    for context in (clean, dirty):
        rows = context.batch({0: (0, 9), 1: (0, 5)})
        drafter.append_context(taps(14), rows, context.cache)
        outs.append(propose(drafter, context, {0: (9, 6), 1: (5, 3)}, torch.arange(9)))
    assert torch.equal(*outs)


def test_proposing_leaves_the_cache_as_it_was():
    drafter = random_drafter(native(True))
    context = PagedContext(drafter, 1, 40)
    drafter.append_context(taps(9), context.batch({0: (0, 9)}), context.cache)
    before = [context.cache.storage(3, layer).clone() for layer in range(2)]
    propose(drafter, context, {0: (9, 6)}, torch.arange(6))
    assert all(torch.equal(old, context.cache.storage(3, layer)) for layer, old in enumerate(before))


def test_context_is_the_same_bits_in_any_chunks():
    drafter = random_drafter(native(True))
    whole, chunked = PagedContext(drafter, 1, 40), PagedContext(drafter, 1, 40)
    aux = taps(37)
    drafter.append_context(aux, whole.batch({0: (0, 37)}), whole.cache)
    for first, last in ((0, 16), (16, 17), (17, 22), (22, 37)):
        batch = chunked.batch({0: (first, last - first)})
        drafter.append_context(aux[first:last], batch, chunked.cache)
    for layer in range(2):
        assert torch.equal(whole.cache.storage(3, layer), chunked.cache.storage(3, layer))


@pytest.mark.parametrize("causal", [True, False])
def test_a_shorter_block_changes_rows_only_where_attention_looks_ahead(causal):
    drafter = random_drafter(native(causal))
    assert drafter.config.causal is causal
    context = PagedContext(drafter, 1, 40)
    drafter.append_context(taps(9), context.batch({0: (0, 9)}), context.cache)
    long = propose(drafter, context, {0: (9, 6)}, torch.arange(6))
    short = propose(drafter, context, {0: (9, 3)}, torch.arange(3))
    assert torch.allclose(long[:3], short, atol=1e-5) is causal


@pytest.mark.parametrize("make", [laguna_json, zlab_json, speculators_json])
def test_drafting_stops_at_the_position_limit(make):
    drafter = random_drafter(make())
    limit = drafter.config.max_position_embeddings
    context = PagedContext(drafter, 1, limit + 8)
    drafter.append_context(taps(8), context.batch({0: (limit - 14, 8)}), context.cache)
    assert torch.isfinite(propose(drafter, context, {0: (limit - 6, 6)}, torch.arange(6))).all()
    with pytest.raises(AssertionError):
        propose(drafter, context, {0: (limit - 5, 6)}, torch.arange(6))


def test_kv_groups_split_layers_by_window():
    layers = ["full_attention", "sliding_attention", "full_attention"]
    config = zlab_json(
        num_hidden_layers=3, layer_types=layers, use_sliding_window=True, sliding_window=8
    )  # fmt: skip
    full, sliding = random_drafter(config).kv_groups()
    assert (full.name, full.num_layers, full.window) == ("draft_full", 2, None)
    assert (sliding.name, sliding.num_layers, sliding.window) == ("draft_sliding", 1, 8)
    assert (full.num_kv_heads, full.head_dim) == (2, 8)


def attend_plainly(drafter, num_context):
    """Return an ``attend`` for blocks that all follow the same context, one query at a time."""
    config = drafter.config

    def attend(layer, q, context_k, context_v, block_k, block_v):
        num_blocks, slots, heads, head_dim = q.shape
        window = config.layer_windows[layer]
        out = torch.empty_like(q)
        for n in range(num_blocks):
            k = torch.cat((context_k, block_k[n])).repeat_interleave(heads // context_k.shape[1], 1)
            v = torch.cat((context_v, block_v[n])).repeat_interleave(heads // context_k.shape[1], 1)
            at, key = num_context + torch.arange(slots)[:, None], torch.arange(len(k))[None, :]
            seen = (key < num_context) | (key <= at if config.layer_causal[layer] else key < len(k))
            if window is not None:
                seen = seen & (at - key < window) & (key - at < window)
            scores = torch.einsum("qhd,khd->hqk", q[n], k) * head_dim**-0.5
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            out[n] = torch.einsum("hqk,khd->qhd", weights.to(v.dtype), v)
        return out

    return attend


def run_dense(drafter, aux, ids):
    length = len(aux)
    positions = (length + torch.arange(ids.shape[1])).expand(ids.shape)
    return drafter.forward_dense(
        EMBEDDING[ids], positions, aux, torch.arange(length), attend_plainly(drafter, length)
    )


@pytest.mark.parametrize(("changes", "causal"), SHAPES)
def test_the_training_path_equals_the_served_path(changes, causal):
    drafter = random_drafter(native(causal, **changes))
    aux, ids = taps(11), torch.arange(12).view(2, 6)
    dense = run_dense(drafter, aux, ids)
    context = PagedContext(drafter, 2, 40)
    rows = context.batch({0: (0, 11), 1: (0, 11)})
    drafter.append_context(torch.cat((aux, aux)), rows, context.cache)
    served = propose(drafter, context, {0: (11, 6), 1: (11, 6)}, ids.flatten())
    torch.testing.assert_close(served, dense.flatten(0, 1), **CLOSE)
    torch.testing.assert_close(run_dense(drafter, aux, ids), dense, rtol=0, atol=0)


@pytest.mark.parametrize("make", [laguna_json, zlab_json, speculators_json])
def test_gradients_reach_every_weight(make):
    drafter = random_drafter(make()).requires_grad_(True)
    run_dense(drafter, taps(11), torch.arange(12).view(2, 6)).square().sum().backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().max() > 0, name


def test_the_training_path_runs_under_autocast():
    drafter = random_drafter(native(True)).requires_grad_(True)
    aux, ids = taps(11), torch.arange(12).view(2, 6)
    exact = run_dense(drafter, aux, ids)
    with torch.autocast("cpu", torch.bfloat16):
        found = run_dense(drafter, aux, ids)
    found.square().sum().backward()
    assert found.dtype == torch.float32
    # bfloat16 keeps 8 bits; two layers of four products each lose a few of them.
    assert (found - exact).abs().mean() < 0.05


def test_the_training_path_is_one_graph_for_the_compiler():
    drafter = random_drafter(native(True)).requires_grad_(True)
    aux, ids = taps(11), torch.arange(12).view(2, 6)
    expected = run_dense(drafter, aux, ids)
    compiled = torch.compile(lambda: run_dense(drafter, aux, ids), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(), expected, **CLOSE)


def test_a_bfloat16_drafter_is_served_from_a_bfloat16_cache():
    exact, rounded = random_drafter(native(True)), random_drafter(native(True)).to(torch.bfloat16)
    hidden = []
    for drafter in (exact, rounded):
        context = PagedContext(drafter, 2, 40)
        rows = context.batch({0: (0, 9), 1: (0, 11)})
        drafter.append_context(taps(20), rows, context.cache)
        hidden.append(propose(drafter, context, {0: (9, 6), 1: (11, 3)}, torch.arange(9)))
    assert hidden[1].dtype == torch.bfloat16
    # bfloat16 keeps 8 bits; two layers of four products each lose a few of them.
    assert (hidden[1] - hidden[0]).abs().mean() < 0.05


def test_a_reduced_vocabulary_proposes_its_own_words_only():
    drafter = random_drafter(speculators_json(draft_vocab_size=5))
    words = torch.tensor([2, 3, 11, 40, 63])
    drafter.d2t = words - torch.arange(5)
    hidden = random_rows(4, HIDDEN, seed=9)
    logits = drafter.compute_logits(hidden, lambda rows: pytest.fail("the target's head is not asked"))
    assert logits.shape == (4, VOCAB)
    own = hidden @ drafter.lm_head.weight.T
    torch.testing.assert_close(logits[:, words], own, **CLOSE)
    rest = torch.ones(VOCAB, dtype=torch.bool)
    rest[words] = False
    assert (logits[:, rest] == -torch.inf).all()


def test_a_full_vocabulary_borrows_the_targets_head():
    drafter = random_drafter(laguna_json())
    hidden = random_rows(4, HIDDEN, seed=9)
    assert drafter.compute_logits(hidden, lambda rows: rows * 2).equal(hidden * 2)
    assert not any("embed" in name or "lm_head" in name for name in drafter.state_dict())


def test_packing_keeps_values_and_later_changes_are_served():
    drafter = random_drafter(native(True))
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    context = PagedContext(drafter, 1, 40)

    def proposal():
        drafter.append_context(taps(9), context.batch({0: (0, 9)}), context.cache)
        return propose(drafter, context, {0: (9, 6)}, torch.arange(6))

    first = proposal()
    assert all(torch.equal(before[name], tensor) for name, tensor in drafter.state_dict().items())
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.mul_(1.5)
    assert not torch.allclose(proposal(), first, atol=1e-2)
    drafter.load_state_dict(before)
    torch.testing.assert_close(proposal(), first, rtol=0, atol=0)
    assert drafter.double().float() is drafter
    torch.testing.assert_close(proposal(), first, rtol=0, atol=0)


def test_fresh_weights_follow_the_seed():
    config = DFlashConfig.from_dict(laguna_json())
    drafters = [DFlashDrafter(config), DFlashDrafter(config)]
    for drafter in drafters:
        drafter.init_weights(generator=torch.Generator().manual_seed(5))
    states = [drafter.state_dict() for drafter in drafters]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert 0.018 < states[0]["fc.weight"].std() < 0.022
    assert (states[0]["aux_hidden_norms"] == 1).all()
