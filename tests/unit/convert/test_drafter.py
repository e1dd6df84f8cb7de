"""Drafters between formats: the same bits and the same rules, or a refusal that names what is missing."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from lean_laguna.convert.drafter import convert_drafter
from lean_laguna.core.drafter_config import DFlashConfig
from lean_laguna.core.errors import CheckpointError, ConfigError
from lean_laguna.models.drafter_checkpoint import load_drafter, save_drafter
from support.drafters import (
    deepspec_json,
    dspark_json,
    laguna_json,
    random_drafter,
    speculators_json,
    tiny_target,
    zlab_json,
)

SLIDING = {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": 8}
# Drafters that both formats can hold, as (config, its format, the other format).
PAIRS = {
    "full layers": (zlab_json(), "z-lab", "speculators"),
    "sliding layers": (zlab_json(**SLIDING), "z-lab", "speculators"),
    "mixed layers": (
        zlab_json(**SLIDING | {"layer_types": ["sliding_attention", "full_attention"]}),
        "z-lab",
        "speculators",
    ),
    "bidirectional sliding layers": (
        speculators_json(SLIDING, sliding_window_non_causal=True, num_target_layers=6),
        "speculators",
        "z-lab",
    ),
    "DSpark": (deepspec_json(), "deepspec", "speculators"),
}


def written(folder, given, dtype=torch.bfloat16):
    """Write a random drafter of a config in its own format."""
    config = DFlashConfig.from_dict(given)
    save_drafter(random_drafter(config), folder, format=config.format, dtype=dtype)
    return folder


def same(first, second):
    """Compare two folders' tensors, names and bits."""
    one, two = (load_file(folder / "model.safetensors") for folder in (first, second))
    return one.keys() == two.keys() and all(
        torch.equal(one[name].view(torch.uint8), two[name].view(torch.uint8)) for name in one
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", PAIRS)
def test_there_and_back_is_the_same_drafter(case, dtype, tmp_path):
    given, before, after = PAIRS[case]
    source = written(tmp_path / "a", given, dtype)
    done = convert_drafter(source, tmp_path / "b", after, target=tiny_target())
    back = convert_drafter(tmp_path / "b", tmp_path / "c", before)
    assert (done.before, done.after, back.after) == (before, after, before)
    assert same(source, tmp_path / "c")
    configs = [DFlashConfig.from_file(tmp_path / name) for name in "abc"]
    assert configs[0] == configs[2]
    assert configs[1].format == after
    assert json.loads((source / "config.json").read_text()) == json.loads(
        (tmp_path / "c/config.json").read_text()
    )


@pytest.mark.parametrize("case", PAIRS)
def test_a_converted_drafter_drafts_the_same(case, tmp_path):
    given, _, after = PAIRS[case]
    source = written(tmp_path / "a", given)
    convert_drafter(source, tmp_path / "b", after)
    one, two = (load_drafter(tmp_path / name, tiny_target()) for name in "ab")
    assert one.state_dict().keys() == two.state_dict().keys()
    assert all(torch.equal(one.state_dict()[name], two.state_dict()[name]) for name in one.state_dict())


@pytest.mark.parametrize(
    ("given", "format", "said"),
    [
        (laguna_json(), "z-lab", "norm per tapped layer"),
        (laguna_json(), "speculators", "norm per tapped layer"),
        (laguna_json(), "deepspec", "norm per tapped layer"),
        (zlab_json(), "laguna", "no norm per tapped layer"),
        (zlab_json(), "deepspec", "no DSpark heads"),
        (dspark_json(), "deepspec", "norm per tapped layer"),
        (deepspec_json(), "z-lab", "DSpark's heads"),
        (speculators_json(draft_vocab_size=32), "z-lab", "a vocabulary of its own"),
        (zlab_json(is_causal=True), "speculators", "full-attention layers are causal inside the block"),
    ],
)
def test_what_a_format_cannot_hold_is_refused_by_name_and_leaves_nothing(given, format, said, tmp_path):
    source = written(tmp_path / "a", given)
    with pytest.raises(ConfigError, match=said):
        convert_drafter(source, tmp_path / "b", format)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_vocabulary_of_its_own_survives(tmp_path):
    source = written(tmp_path / "a", speculators_json(draft_vocab_size=32))
    convert_drafter(source, tmp_path / "b", "speculators")
    assert same(source, tmp_path / "b")
    assert {"d2t", "t2d", "lm_head.weight"} <= load_file(source / "model.safetensors").keys()


def test_split_projections_of_a_native_drafter_are_joined_as_vllm_wants_them(tmp_path):
    source = written(tmp_path / "a", laguna_json())
    expected = load_file(source / "model.safetensors")
    split = {}
    for name, tensor in expected.items():
        if "qkv_proj" not in name:
            split[f"model.{name}"] = tensor
            continue
        for part, rows in zip("qkv", tensor.split([32, 16, 16]), strict=True):
            split[f"model.{name.replace('qkv', part)}"] = rows.contiguous()
    save_file(split, source / "model.safetensors")
    convert_drafter(source, tmp_path / "b", "laguna")
    found = load_file(tmp_path / "b" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_copies_of_the_targets_weights_are_left_out_and_said(tmp_path):
    source = written(tmp_path / "a", zlab_json())
    tensors = load_file(source / "model.safetensors")
    copies = {"embed_tokens.weight": torch.ones(64, 32), "lm_head.weight": torch.ones(64, 32)}
    save_file(tensors | copies, source / "model.safetensors")  # in float32, beside bfloat16
    done = convert_drafter(source, tmp_path / "b", "speculators")
    assert done.left_out == ("embed_tokens.weight", "lm_head.weight")
    assert not copies.keys() & load_file(tmp_path / "b" / "model.safetensors").keys()


def test_licence_and_provenance_come_along_and_the_target_is_recorded(tmp_path):
    source = written(tmp_path / "a", zlab_json())
    given = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(given | {"provenance": {"commit": "abc"}}))
    (source / "LICENSE").write_text("of the drafter")
    convert_drafter(source, tmp_path / "b", "speculators", target_name="owner/target")
    found = json.loads((tmp_path / "b" / "config.json").read_text())
    assert found["provenance"] == {"commit": "abc"}
    assert found["speculators_config"]["verifier"]["name_or_path"] == "owner/target"
    assert (tmp_path / "b" / "LICENSE").read_text() == "of the drafter"
    convert_drafter(tmp_path / "b", tmp_path / "c", "speculators")
    assert json.loads((tmp_path / "c" / "config.json").read_text()) == found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t | {"norm.weight": t["norm.weight"].float()}, "BF16, F32; expected one number format"),
        (lambda t: {n: v for n, v in t.items() if n != "fc.weight"}, "tensors are missing"),
        (lambda t: t | {"fc.weight": t["fc.weight"] * float("nan")}, "not all values are finite"),
    ],
)
def test_damaged_sources_are_refused_and_leave_nothing(change, said, tmp_path):
    source = written(tmp_path / "a", zlab_json())
    save_file(change(load_file(source / "model.safetensors")), source / "model.safetensors")
    with pytest.raises(CheckpointError, match=said):
        convert_drafter(source, tmp_path / "b", "speculators")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_quantised_drafters_and_other_targets_are_refused(tmp_path):
    source = written(tmp_path / "a", zlab_json())
    with pytest.raises(ConfigError, match="not made for this target"):
        convert_drafter(source, tmp_path / "b", "speculators", target=tiny_target(hidden_size=48))
    given = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(given | {"quantization_config": {"quant_method": "x"}}))
    with pytest.raises(CheckpointError, match="this drafter is quantised"):
        convert_drafter(source, tmp_path / "b", "speculators")


def test_the_targets_depth_is_filled_in_where_the_source_does_not_say_it(tmp_path):
    source = written(tmp_path / "a", speculators_json())
    with pytest.raises(ConfigError, match="name the target with --target"):
        convert_drafter(source, tmp_path / "b", "z-lab")
    convert_drafter(source, tmp_path / "b", "z-lab", target=tiny_target())
    assert DFlashConfig.from_file(tmp_path / "b").num_target_layers == tiny_target().num_hidden_layers
