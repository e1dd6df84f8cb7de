"""z-lab's dflash package and ours, same weights and taps, across rounds with rejections."""

import json

import pytest
import torch
from safetensors.torch import save_file

from lean_laguna.models.drafter_checkpoint import load_drafter
from support.drafters import HIDDEN, VOCAB, PagedContext, random_rows, tiny_target, zlab_json

pytestmark = pytest.mark.oracle
zlab = pytest.importorskip("dflash.model")

EMBEDDING = random_rows(VOCAB, HIDDEN, seed=3)
HEAD = random_rows(VOCAB, HIDDEN, seed=5)
SLIDING, FULL = "sliding_attention", "full_attention"
CASES = [
    pytest.param({}, id="full, bidirectional"),
    pytest.param({"is_causal": True}, id="full, causal"),
    pytest.param(
        {"layer_types": [SLIDING] * 2, "use_sliding_window": True, "sliding_window": 8}, id="window"
    ),
    pytest.param(
        {"layer_types": [SLIDING] * 2, "use_sliding_window": True, "sliding_window": 8, "is_causal": False},
        id="window, bidirectional",
    ),
    pytest.param(
        {"layer_types": [SLIDING] * 2, "use_sliding_window": True, "sliding_window": 4, "is_causal": False},
        id="window below the block, bidirectional",
    ),
    pytest.param(
        {"layer_types": [FULL, SLIDING], "use_sliding_window": True, "sliding_window": 8},
        id="full then window",
    ),
    pytest.param({"rope_theta": 1e6, "block_size": 4}, id="other rope and block"),
    pytest.param(
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        id="yarn",
    ),
]


def reference_and_ours(changes, folder):
    """Return z-lab's model with random weights and our drafter loaded from its tensors."""
    config_json = zlab_json(**changes)
    config = zlab.Qwen3Config(**config_json)
    config._attn_implementation = "sdpa"
    reference = zlab.DFlashDraftModel(config).eval()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in reference.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        scale = 1.5 / parameter.shape[-1] ** 0.5
        parameter.data = 1 + 0.3 * noise if "norm" in name else noise * scale
    save_file(reference.state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_json))
    return reference, load_drafter(folder, tiny_target())


@torch.no_grad()
@pytest.mark.parametrize("changes", CASES)
def test_hidden_states_logits_and_proposals_agree(changes, tmp_path):
    reference, drafter = reference_and_ours(changes, tmp_path)
    size = reference.block_size
    assert drafter.config.draft_block_size == size
    context = PagedContext(drafter, 1, 80)
    cache = zlab._make_cache(reference.config)
    committed = random_rows(80, 3, HIDDEN, seed=4)
    position, new = 5, committed[:5]
    drafter.append_context(new, context.batch({0: (0, position)}), context.cache)
    for turn, accepted in enumerate([0, 3, 2, 1, 0, 3, 3, 3, 2, 3]):
        ids = torch.full((size,), reference.mask_token_id)
        ids[0] = turn * 7
        expected = reference(
            target_hidden=new.flatten(1)[None],
            noise_embedding=EMBEDDING[ids][None],
            position_ids=torch.arange(position - len(new), position + size)[None],
            past_key_values=cache,
            use_cache=True,
        )[0]
        zlab._crop_to(cache, position)
        hidden = drafter.propose(
            context.batch({0: (position, size)}, ids), context.cache, lambda rows: EMBEDDING[rows]
        )
        # float32 sums in another order; hidden states have size 1, logits about 6.
        torch.testing.assert_close(hidden, expected, rtol=2e-5, atol=2e-5)
        logits = drafter.compute_logits(hidden, lambda rows: rows @ HEAD.T)
        theirs = reference.compute_logits(expected, lambda rows: rows @ HEAD.T)
        torch.testing.assert_close(logits, theirs, rtol=2e-5, atol=2e-4)
        assert torch.equal(logits.argmax(-1), theirs.argmax(-1))
        new = committed[position : position + accepted + 1]
        verified = random_rows(size, 3, HIDDEN, seed=100 + turn)
        verified[: accepted + 1] = new
        drafter.append_context(verified, context.batch({0: (position, size)}), context.cache)
        position += accepted + 1
        if drafter.config.window is not None and all(drafter.config.layer_windows):
            context.forget_before(0, max(0, position - drafter.config.window + 1))


@pytest.mark.parametrize("depth", [6, 12, 36, 48])
@pytest.mark.parametrize("layers", [1, 2, 5])
def test_taps_left_out_of_the_config_are_the_packages_defaults(depth, layers):
    from lean_laguna.core.drafter_config import DFlashConfig

    config = zlab_json(
        num_target_layers=depth,
        num_hidden_layers=layers,
        layer_types=[FULL] * layers,
        dflash_config={"mask_token_id": 12},
    )
    expected = zlab.build_target_layer_ids(depth, layers)
    if len(set(expected)) == layers:
        assert list(DFlashConfig.from_dict(config).target_layer_ids) == expected
