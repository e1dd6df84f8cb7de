"""What a checkpoint holds, held against real files and against the same described by its config alone."""

import json
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from lean_laguna.models.checkpoint_writer import save_laguna
from lean_laguna.models.shapes import laguna_shape
from lean_laguna.plan.files import read_files
from lean_laguna.plan.inventory import (
    drafter_from_headers,
    scheme_lookup,
    target_from_config,
    target_from_headers,
)
from lean_laguna.plan.schemes import stored_as
from support.checkpoints import write_tiny_drafter, write_tiny_target
from support.engines import tiny_config, tiny_target
from support.sparse_checkpoints import NVFP4_EXPERTS, write_sparse_target


def described(folder):
    """Return the inventories that a folder's headers and its config alone give."""
    _, from_headers = target_from_headers(folder, read_files(folder).header)
    _, from_config = target_from_config(json.loads((folder / "config.json").read_text()), "config.json")
    return from_headers, from_config


def test_headers_and_config_agree_on_a_real_checkpoint(tmp_path):
    save_laguna(tiny_target(), tiny_config(), tmp_path)
    from_headers, from_config = described(tmp_path)
    assert from_headers == from_config
    assert from_headers.stored_bytes == sum(
        t.nbytes for t in load_file(tmp_path / "model.safetensors").values()
    )
    assert from_headers.num_weights() == sum(p.numel() for p in tiny_target().parameters())
    assert from_headers.formats("attention") == ("F32",)


def test_headers_and_config_agree_on_a_quantised_checkpoint(tmp_path):
    write_sparse_target(tmp_path, tiny_config(), quantization=NVFP4_EXPERTS)
    from_headers, from_config = described(tmp_path)
    assert from_headers == from_config
    assert from_headers.has_fp8_kv
    assert from_headers.formats("experts") == ("NVFP4",)
    assert from_headers.formats("attention") == ("BF16",)
    assert from_headers.groups == stored_as(tiny_config(), "nvfp4").groups


def test_a_checkpoint_of_20_gb_is_known_at_once(tmp_path):
    write_sparse_target(tmp_path, laguna_shape("laguna-xs"), quantization=NVFP4_EXPERTS, num_shards=5)
    started = time.process_time()
    files = read_files(tmp_path)
    target_from_headers(tmp_path, files.header)
    assert time.process_time() - started < 5.0  # about one second; machines differ
    assert files.num_bytes > 20e9
    assert not files.problems


def test_mixed_precision_of_one_class_is_told_apart(tmp_path):
    int4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16}
    groups = {
        "a": {"targets": ["re:.*layers[.]1[.]mlp[.]experts[.][0-9]+[.].*"], "weights": int4},
        "b": {
            "targets": ["re:.*layers[.]2[.]mlp[.]experts[.][0-9]+[.].*"],
            "weights": int4 | {"num_bits": 8},
        },
    }
    quantization = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    write_sparse_target(tmp_path, tiny_config(), quantization=quantization)
    from_headers, from_config = described(tmp_path)
    assert from_headers == from_config
    assert set(from_headers.formats("experts")) == {"INT4 group 16", "INT8 group 16", "BF16"}


def test_config_and_tensors_that_disagree_are_named(tmp_path):
    write_sparse_target(tmp_path, tiny_config())
    given = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(given | {"quantization_config": NVFP4_EXPERTS}))
    problems = described(tmp_path)[0].problems
    assert "experts" in problems[0]
    assert "the config says NVFP4, its file holds BF16" in problems[0]
    write_sparse_target(tmp_path, tiny_config(), quantization=NVFP4_EXPERTS)
    (tmp_path / "config.json").write_text(json.dumps(given))
    assert "stored quantised, which the config does not say" in described(tmp_path)[0].problems[0]


def test_fused_experts_and_other_spellings_are_counted_the_same(tmp_path):
    write_tiny_target(tmp_path)
    expected, _ = described(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    respelled = {name: t for name, t in tensors.items() if ".mlp.experts." not in name or "bias" in name}
    for i in (1, 2, 3):
        bank = f"model.layers.{i}.mlp.experts"
        part = {p: [tensors[f"{bank}.{e}.{p}_proj.weight"] for e in range(8)] for p in ("gate", "up", "down")}
        respelled[f"{bank}.gate_up_proj"] = torch.stack(
            [torch.cat(pair) for pair in zip(part["gate"], part["up"], strict=True)]
        )
        respelled[f"{bank}.down_proj"] = torch.stack(part["down"])
    respelled = {
        f"language_model.{n.replace('shared_expert.', 'shared_experts.')}": t for n, t in respelled.items()
    }
    save_file(respelled, tmp_path / "model.safetensors")
    found, _ = described(tmp_path)
    for kind in ("attention", "experts", "shared", "router", "norms", "head", "embedding"):
        assert found.num_weights(kind) == expected.num_weights(kind)
        assert found.read_bytes(kind) == expected.read_bytes(kind)


@pytest.mark.parametrize("borrowed", [True, False])
def test_a_drafter_is_counted_without_what_it_borrows(borrowed, tmp_path):
    write_tiny_drafter(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    expected = sum(tensor.nbytes for tensor in tensors.values())
    if borrowed:
        tensors |= {"embed_tokens.weight": torch.ones(320, 32), "lm_head.weight": torch.ones(320, 32)}
        save_file(tensors, tmp_path / "model.safetensors")
    found = drafter_from_headers(read_files(tmp_path).header, scheme_lookup(None))
    assert found.stored_bytes == expected
