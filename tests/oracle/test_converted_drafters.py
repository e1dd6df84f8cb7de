"""Drafters converted between formats, read by the packages whose formats they are."""

import json

import pytest
import torch
from safetensors.torch import load_file

from lean_laguna.convert.drafter import convert_drafter
from lean_laguna.core.drafter_config import DFlashConfig
from lean_laguna.models.drafter_checkpoint import save_drafter
from oracle.test_dflash_against_speculators import WINDOW, core, reference_model
from support.drafters import random_drafter, tiny_target, zlab_json

pytestmark = pytest.mark.oracle
zlab = pytest.importorskip("dflash.model")

# What speculators' model holds beside the drafter: the target's own weights.
VERIFIERS = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight")


@pytest.mark.parametrize("network", [{}, WINDOW], ids=["full", "window"])
def test_a_speculators_drafter_becomes_one_that_z_lab_reads(network, tmp_path):
    model = reference_model(network)
    model.save_pretrained(tmp_path / "a")
    convert_drafter(tmp_path / "a", tmp_path / "b", "z-lab", target=tiny_target())
    config = zlab.Qwen3Config(**json.loads((tmp_path / "b" / "config.json").read_text()))
    reader = zlab.DFlashDraftModel(config)
    reader.load_state_dict(load_file(tmp_path / "b" / "model.safetensors"), strict=True)
    theirs = model.state_dict()
    for name, weight in reader.state_dict().items():
        assert torch.equal(weight, theirs[name]), name


@pytest.mark.parametrize("sliding", [False, True])
def test_a_z_lab_drafter_becomes_one_that_speculators_reads(sliding, tmp_path):
    config = DFlashConfig.from_dict(zlab_json(**(WINDOW if sliding else {})))
    save_drafter(random_drafter(config), tmp_path / "a", format="z-lab")
    convert_drafter(tmp_path / "a", tmp_path / "b", "speculators")
    read = core.DFlashSpeculatorConfig.from_pretrained(tmp_path / "b")
    assert (read.block_size, read.mask_token_id, read.draft_vocab_size) == (6, 12, config.vocab_size)
    assert list(read.aux_hidden_state_layer_ids) == [2, 4, 6]
    read.transformer_layer_config._attn_implementation = "eager"
    model = core.DFlashDraftModel(read)
    missing, unexpected = model.load_state_dict(load_file(tmp_path / "b" / "model.safetensors"), strict=False)
    assert not unexpected
    assert set(missing) <= set(VERIFIERS)
