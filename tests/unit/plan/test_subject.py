"""What can be inspected: folders, configs alone, shapes, names; drafters and targets are told apart."""

import json

import pytest
from safetensors.torch import load_file

from lean_laguna.convert.quantize import quantize
from lean_laguna.convert.quantize_plan import group_rules, make_plan
from lean_laguna.convert.source import open_source
from lean_laguna.core.errors import CheckpointError, ConfigError
from lean_laguna.models.shapes import drafter_shape, laguna_shape
from lean_laguna.plan.subject import drafter_of, target_of, target_of_shape
from lean_laguna.quant.scheme import NVFP4
from support.checkpoints import write_tiny_drafter, write_tiny_target
from support.engines import tiny_config
from support.sparse_checkpoints import NVFP4_EXPERTS, write_sparse_target


def test_the_built_in_model_is_known_from_its_files_and_whole():
    target = target_of("nano")
    assert (target.known_from, target.files.problems) == ("headers", ())
    assert target.inventory.num_weights() > 9e6
    assert drafter_of("nano-dflash").inventory.num_weights() > 2e6


def test_a_config_alone_says_the_same_as_the_files(tmp_path):
    write_sparse_target(tmp_path, tiny_config(), quantization=NVFP4_EXPERTS)
    from_files, from_config = target_of(str(tmp_path)), target_of(str(tmp_path / "config.json"))
    assert from_files.inventory == from_config.inventory
    assert from_config.files is None
    for shard in tmp_path.glob("model*"):
        shard.unlink()
    from_folder = target_of(str(tmp_path))
    assert from_folder.known_from == "config"
    assert "only the configuration is here" in from_folder.files.problems[0]


def test_a_damaged_folder_is_described_with_its_problems(tmp_path):
    write_tiny_target(tmp_path)
    given = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(given | {"quantization_config": NVFP4_EXPERTS}))
    problems = "\n".join(target_of(str(tmp_path)).files.problems)
    assert "weight_packed' and" in problems
    assert "the config says NVFP4, its file holds F32" in problems


def test_shapes_have_names():
    target = target_of_shape("laguna-xs-2.1", "nvfp4")
    assert (target.config, target.known_from) == (laguna_shape("laguna-xs-2.1"), "shape")
    assert target.name == "laguna-xs-2.1, NVFP4 experts + shared"
    assert drafter_of("laguna-xs-2.1").config == drafter_shape("laguna-xs-2.1")
    with pytest.raises(ConfigError, match="unknown shape"):
        target_of_shape("laguna-m", "bf16")


def test_drafters_and_targets_are_told_apart(tmp_path):
    write_tiny_drafter(tmp_path / "drafter")
    with pytest.raises(
        CheckpointError, match="this is a drafter; give the target, and this one with --drafter"
    ):
        target_of(str(tmp_path / "drafter"))
    with pytest.raises(CheckpointError, match="this is a target"):
        drafter_of("nano")


def test_a_quantised_drafter_is_counted_as_stored(tmp_path):
    folder = write_tiny_drafter(tmp_path / "plain")
    source = open_source(folder)
    schemes = make_plan(source, group_rules("all", NVFP4))
    quantize(source, tmp_path / "nvfp4", schemes)
    plain, quantised = (drafter_of(str(tmp_path / name)).inventory for name in ("plain", "nvfp4"))
    assert quantised.num_weights() == plain.num_weights()
    assert quantised.formats("drafter")[0] == "NVFP4"
    tensors = load_file(tmp_path / "nvfp4" / "model.safetensors")
    assert quantised.stored_bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_what_a_damaged_target_holds_is_counted_from_its_config(tmp_path):
    whole, damaged = (
        write_sparse_target(tmp_path / name, tiny_config(), quantization=NVFP4_EXPERTS, num_shards=2)
        for name in ("whole", "damaged")
    )
    (damaged / "model-00002-of-00002.safetensors").unlink()
    target = target_of(str(damaged))
    assert target.known_from == "config"
    assert target.inventory == target_of(str(whole)).inventory
    assert len(target.files.problems) == 1


def test_a_damaged_drafter_is_refused(tmp_path):
    file = write_tiny_drafter(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=r"the drafter is not whole: model\.safetensors: truncated"):
        drafter_of(str(tmp_path))
