import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from lean_laguna.core.errors import CheckpointError, ConfigError
from lean_laguna.models.drafter_checkpoint import load_drafter, save_drafter
from support.drafters import (
    DSPARK,
    PagedContext,
    deepspec_json,
    dspark_json,
    laguna_json,
    random_drafter,
    random_rows,
    speculators_json,
    tiny_target,
    zlab_json,
)


@pytest.fixture
def folder(tmp_path):
    save_drafter(random_drafter(laguna_json()), tmp_path)
    return tmp_path


def tensors_of(folder):
    return load_file(folder / "model.safetensors")


def rewrite(folder, tensors, config=None):
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))


def split_qkv(tensors):
    """Return the tensors with q, k and v apart, as the Qwen3 formats have them."""
    split = {}
    for name, value in tensors.items():
        if "qkv_proj" not in name:
            split[name] = value
            continue
        for part, rows in zip("qkv", value.split([32, 16, 16]), strict=True):
            split[name.replace("qkv_proj", f"{part}_proj")] = rows
    return split


def assert_same(first, second):
    ours, theirs = first.state_dict(), second.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_native_format_has_vllms_names_and_shapes(folder):
    shapes = {name: tuple(value.shape) for name, value in tensors_of(folder).items()}
    layer = {
        "input_layernorm.weight": (32,),
        "post_attention_layernorm.weight": (32,),
        "self_attn.qkv_proj.weight": (64, 32),
        "self_attn.o_proj.weight": (32, 32),
        "self_attn.g_proj.weight": (4, 32),
        "self_attn.q_norm.weight": (8,),
        "self_attn.k_norm.weight": (8,),
        "mlp.gate_proj.weight": (48, 32),
        "mlp.up_proj.weight": (48, 32),
        "mlp.down_proj.weight": (32, 48),
    }
    assert shapes == {
        "fc.weight": (32, 96),
        "hidden_norm.weight": (32,),
        "norm.weight": (32,),
        **{f"aux_hidden_norms.{j}.weight": (32,) for j in range(3)},
        **{f"layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()},
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_round_trip_keeps_every_bit(dtype, tmp_path):
    drafter = random_drafter(laguna_json()).to(dtype)
    save_drafter(drafter, tmp_path / "a")
    again = load_drafter(tmp_path / "a", tiny_target(), dtype=dtype)
    assert_same(drafter, again)
    assert again.config == drafter.config
    save_drafter(again, tmp_path / "b")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_drafter_that_has_served_is_saved_the_same(tmp_path):
    drafter = random_drafter(laguna_json())
    save_drafter(drafter, tmp_path / "a")
    context = PagedContext(drafter, 1, 20)
    drafter.append_context(random_rows(5, 3, 32, seed=1), context.batch({0: (0, 5)}), context.cache)
    save_drafter(drafter, tmp_path / "b")
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()


def test_the_written_config_is_explicit_about_causality_dtype_and_provenance(tmp_path):
    config = laguna_json(dflash_config={"target_layer_ids": [1, 3, 5], "mask_token_id": 12})
    save_drafter(random_drafter(config), tmp_path, dtype=torch.bfloat16, provenance={"commit": "abc"})
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["dflash_config"] == {
        "target_layer_ids": [1, 3, 5],
        "mask_token_id": 12,
        "causal": True,
        "sample_from_anchor": False,
    }
    assert written["dtype"] == "bfloat16"
    assert written["provenance"] == {"commit": "abc"}
    assert {value.dtype for value in tensors_of(tmp_path).values()} == {torch.bfloat16}


@pytest.mark.parametrize("prefix", ["model.", "language_model.model."])
@pytest.mark.parametrize("split", [True, False])
def test_split_projections_and_prefixes_are_accepted(folder, prefix, split):
    expected = load_drafter(folder, tiny_target())
    tensors = tensors_of(folder)
    if split:
        tensors = split_qkv(tensors)
    rewrite(folder, {prefix + name: value for name, value in tensors.items()})
    assert_same(load_drafter(folder, tiny_target()), expected)


def test_one_tap_has_one_norm(tmp_path):
    drafter = random_drafter(laguna_json(dflash_config={"target_layer_ids": [5], "mask_token_id": 12}))
    save_drafter(drafter, tmp_path)
    assert_same(load_drafter(tmp_path, tiny_target()), drafter)


@pytest.mark.parametrize("config", [zlab_json(), speculators_json()])
def test_the_qwen3_formats_leave_out_gates_and_norms_per_tap(config, folder):
    kept = {
        name: value
        for name, value in split_qkv(tensors_of(folder)).items()
        if "g_proj" not in name and "aux" not in name
    }
    rewrite(folder, kept, config)
    drafter = load_drafter(folder, tiny_target())
    assert drafter.aux_hidden_norms is None
    assert drafter.layers[0].self_attn.g_proj is None
    assert torch.equal(drafter.fc.weight, kept["fc.weight"])


def test_the_targets_own_weights_in_the_file_are_ignored(folder):
    expected = load_drafter(folder, tiny_target())
    tensors = tensors_of(folder)
    rewrite(
        folder, tensors | {"embed_tokens.weight": torch.ones(64, 32), "lm_head.weight": torch.ones(64, 32)}
    )
    assert_same(load_drafter(folder, tiny_target()), expected)


def reduced(folder, **changes):
    tensors = {
        name: value
        for name, value in split_qkv(tensors_of(folder)).items()
        if "g_proj" not in name and "aux" not in name
    }
    words = torch.tensor([1, 4, 9, 60])
    t2d = torch.zeros(64, dtype=torch.bool)
    t2d[words] = True
    tensors |= {"lm_head.weight": torch.ones(4, 32), "d2t": words - torch.arange(4), "t2d": t2d} | changes
    tensors = {name: value for name, value in tensors.items() if value is not None}
    rewrite(folder, tensors, speculators_json(draft_vocab_size=4))


@pytest.mark.parametrize("t2d", [True, False])
def test_a_reduced_vocabulary_comes_with_its_map(folder, t2d):
    reduced(folder, **({} if t2d else {"t2d": None}))
    drafter = load_drafter(folder, tiny_target(), dtype=torch.bfloat16)
    assert drafter.d2t.tolist() == [1, 3, 7, 57]
    assert drafter.d2t.dtype == torch.int64
    assert drafter.lm_head.weight.shape == (4, 32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d2t": None}, "1 of 27 tensors are missing .*: d2t"),
        ({"lm_head.weight": None}, "missing .*: lm_head.weight"),
        ({"d2t": torch.tensor([1, 3, 7, 61])}, r"tensor 'd2t': must map each draft word .* 0\.\.63"),
        (
            {"d2t": torch.tensor([1, 0, 7, 57])},
            "tensor 'd2t': must map each draft word to a target word of its own",
        ),
        ({"d2t": torch.tensor([1, 3])}, r"tensor 'd2t': found shape \[2\], expected \[4\]"),
        ({"t2d": torch.zeros(64, dtype=torch.bool)}, "tensor 't2d': names other target words"),
    ],
)
def test_a_vocabulary_map_that_cannot_be_right_is_refused(folder, changes, message):
    reduced(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_drafter(folder, tiny_target())


def test_missing_tensors_are_counted_and_named(folder):
    tensors = {
        name: value
        for name, value in tensors_of(folder).items()
        if "aux" not in name and "g_proj" not in name
    }
    rewrite(folder, tensors)
    with pytest.raises(
        CheckpointError, match=r"5 of 26 tensors are missing .*aux_hidden_norms\.0\.weight.*g_proj"
    ):
        load_drafter(folder, tiny_target())


def test_a_missing_projection_is_named_as_the_file_spells_it(folder):
    tensors = tensors_of(folder)
    fused = {name: value for name, value in tensors.items() if name != "layers.1.self_attn.qkv_proj.weight"}
    rewrite(folder, fused)
    with pytest.raises(CheckpointError, match=r": layers\.1\.self_attn\.qkv_proj\.weight$"):
        load_drafter(folder, tiny_target())
    split = split_qkv(tensors)
    del split["layers.1.self_attn.k_proj.weight"]
    rewrite(folder, split)
    with pytest.raises(CheckpointError, match=r": layers\.1\.self_attn\.k_proj\.weight$"):
        load_drafter(folder, tiny_target())


def test_extra_tensors_are_named(folder):
    rewrite(
        folder,
        tensors_of(folder) | {"mask_embedding": torch.ones(32), "model.layers.0.attn.sink": torch.ones(4)},
    )
    with pytest.raises(
        CheckpointError, match=r"2 tensors have no place .*mask_embedding, model\.layers\.0\.attn\.sink"
    ):
        load_drafter(folder, tiny_target())


def test_a_misshapen_tensor_is_named_with_both_shapes(folder):
    rewrite(folder, tensors_of(folder) | {"fc.weight": torch.ones(32, 64)})
    with pytest.raises(
        CheckpointError, match=r"tensor 'fc\.weight': found shape \[32, 64\], expected \[32, 96\]"
    ):
        load_drafter(folder, tiny_target())


def test_values_that_are_not_finite_are_refused_both_ways(folder):
    bad = tensors_of(folder)["norm.weight"]
    bad[3] = torch.nan
    rewrite(folder, tensors_of(folder) | {"norm.weight": bad})
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: tensor 'norm\.weight': not all values are finite"
    ):
        load_drafter(folder, tiny_target())
    drafter = random_drafter(laguna_json())
    drafter.norm.data[3] = torch.inf
    with pytest.raises(
        CheckpointError, match="weight norm has values that are not finite; nothing was written"
    ):
        save_drafter(drafter, folder / "new")
    assert not (folder / "new").exists()


def test_integer_weights_are_refused(folder):
    rewrite(folder, tensors_of(folder) | {"fc.weight": torch.ones(32, 96, dtype=torch.int8)})
    with pytest.raises(
        CheckpointError, match=r"found type I8, expected one of F64, F32, F16, BF16, or a quantization_config"
    ):
        load_drafter(folder, tiny_target())


def test_a_name_stored_twice_is_refused(folder):
    rewrite(folder, tensors_of(folder) | {"model.norm.weight": torch.ones(32)})
    with pytest.raises(CheckpointError, match=r"'norm\.weight' is also stored as 'model\.norm\.weight'"):
        load_drafter(folder, tiny_target())


def test_a_truncated_file_is_refused(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="truncated"):
        load_drafter(folder, tiny_target())


def test_a_drafter_for_another_target_is_refused_before_its_tensors_are_read(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="'hidden_size' is 32, but the target's is 64"):
        load_drafter(folder, tiny_target(hidden_size=64))


def test_a_format_that_cannot_say_what_a_drafter_computes_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be written as z-lab: .*aux_hidden_norms"):
        save_drafter(random_drafter(laguna_json()), tmp_path / "x", format="z-lab")
    with pytest.raises(ConfigError, match=r"\(z-lab format\) cannot be written as Laguna native"):
        save_drafter(random_drafter(zlab_json()), tmp_path / "x")
    with pytest.raises(ConfigError, match=r"unknown drafter format 'speculator'.*speculators"):
        save_drafter(random_drafter(zlab_json()), tmp_path / "x", format="speculator")
    with pytest.raises(ConfigError, match="as z-lab: it has DSpark's heads"):
        save_drafter(random_drafter(deepspec_json()), tmp_path / "x", format="z-lab")
    with pytest.raises(ConfigError, match="as deepspec: its blocks do not sample from the anchor"):
        save_drafter(random_drafter(deepspark_fill_in()), tmp_path / "x", format="deepspec")
    assert not (tmp_path / "x").exists()


def deepspark_fill_in():
    return speculators_json(speculators_model_type="dspark", **DSPARK)  # its sample_from_anchor is false


@pytest.mark.parametrize(
    ("given", "format"),
    [
        (dspark_json(), "laguna"),
        (dspark_json(dflash_config={**laguna_json()["dflash_config"], "sample_from_anchor": True}), "laguna"),
        (zlab_json(), "z-lab"),
        (zlab_json(), "speculators"),
        (speculators_json(), "z-lab"),
        (speculators_json(draft_vocab_size=20), "speculators"),
        (deepspark_fill_in(), "speculators"),
        (deepspec_json(), "speculators"),
        (deepspec_json(), "deepspec"),
    ],
)
def test_what_is_written_in_a_format_is_read_back_to_the_bit(given, format, tmp_path):
    drafter = random_drafter(given)
    if drafter.d2t is not None:
        drafter.d2t.copy_(torch.arange(20) * 2 + 1)
    save_drafter(drafter, tmp_path, format=format, target_name="poolside/Laguna-XS-2.1")
    again = load_drafter(tmp_path, tiny_target())
    assert_same(drafter, again)
    assert dataclasses.replace(again.config, format="laguna", num_target_layers=6) == dataclasses.replace(
        drafter.config, format="laguna", num_target_layers=6
    )
    written = (tmp_path / "config.json").read_text()
    assert '"causal": ' in written
    assert '"sample_from_anchor": ' in written
    assert not any("embed" in name or "lm_head" in name for name in tensors_of(tmp_path)) or drafter.lm_head


def test_frozen_copies_of_the_targets_ends_in_a_dspark_checkpoint_are_not_used(tmp_path):
    save_drafter(random_drafter(dspark_json()), tmp_path)
    expected = load_drafter(tmp_path, tiny_target())
    copies = {name: torch.ones(64, 32) for name in ("embed_tokens.weight", "lm_head.weight")}
    rewrite(tmp_path, tensors_of(tmp_path) | copies)
    again = load_drafter(tmp_path, tiny_target())
    assert_same(again, expected)
    assert again.lm_head is None
