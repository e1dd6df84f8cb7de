import json

import pytest
import torch
from tests.support.targets import random_ids, random_target, run_alone

from lean_laguna.core.errors import CheckpointError
from lean_laguna.models.checkpoint import load_laguna
from lean_laguna.models.checkpoint_writer import save_laguna
from lean_laguna.models.safetensors_reader import CheckpointReader


def test_names_are_those_of_the_published_checkpoints(tiny_target, tiny_config, tmp_path):
    save_laguna(tiny_target, tiny_config, tmp_path)
    reader = CheckpointReader(tmp_path)
    names = set(reader.names())
    assert {
        "model.layers.1.mlp.experts.7.gate_proj.weight",
        "model.layers.1.mlp.experts.7.up_proj.weight",
        "model.layers.1.mlp.experts.0.down_proj.weight",
        "model.layers.1.mlp.experts.e_score_correction_bias",
        "model.layers.1.mlp.shared_expert.gate_proj.weight",
        "model.layers.1.mlp.gate.weight",
        "lm_head.weight",
    } <= names
    assert not any("shared_experts" in name or "gate_up" in name for name in names)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize("shard", [1, 5000, 1 << 30])
def test_what_is_saved_loads_in_shards_of_any_size(tiny_target, tiny_config, tmp_path, shard):
    save_laguna(tiny_target, tiny_config, tmp_path, max_shard_bytes=shard)
    ids = random_ids(30)
    assert torch.equal(run_alone(load_laguna(tmp_path), ids, [30])[0], run_alone(tiny_target, ids, [30])[0])
    for file in tmp_path.glob("*.safetensors"):
        sizes = [tensor["data_offsets"] for tensor in _header(file).values()]
        assert len(sizes) == 1 or max(end for _, end in sizes) <= shard


def _header(file):
    data = file.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    header.pop("__metadata__")
    return header


def test_bfloat16_on_disk_keeps_the_correction_bias_whole(tiny_target, tiny_config, tmp_path):
    save_laguna(tiny_target.state_dict(), tiny_config, tmp_path, dtype=torch.bfloat16)
    reader = CheckpointReader(tmp_path)
    for name in reader.names():
        assert reader.dtype_name(name) == ("F32" if name.endswith("correction_bias") else "BF16"), name
    loaded = load_laguna(tmp_path)
    for name, tensor in tiny_target.state_dict().items():
        rounded = tensor if name.endswith("correction_bias") else tensor.bfloat16().float()
        assert torch.equal(loaded.state_dict()[name], rounded), name


def test_compiled_names_are_understood(tiny_target, tiny_config, tmp_path):
    state = {f"_orig_mod.{name}": tensor for name, tensor in tiny_target.state_dict().items()}
    save_laguna(state, tiny_config, tmp_path)
    assert load_laguna(tmp_path).config == tiny_config


def test_saving_again_leaves_no_stale_shard_and_keeps_other_files(tiny_target, tiny_config, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    save_laguna(tiny_target, tiny_config, tmp_path, max_shard_bytes=5000)
    save_laguna(tiny_target, tiny_config, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    save_laguna(tiny_target, tiny_config, tmp_path, max_shard_bytes=50_000)
    assert not (tmp_path / "model.safetensors").exists()
    load_laguna(tmp_path)


def test_weights_that_are_not_finite_are_not_written(tiny_config, tmp_path):
    target = random_target(tiny_config)
    target.lm_head.weight[3, 4] = float("nan")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*not finite; nothing was written"):
        save_laguna(target, tiny_config, tmp_path / "new")
    assert not list((tmp_path / "new").iterdir())
