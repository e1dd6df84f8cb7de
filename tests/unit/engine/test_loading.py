import json
from concurrent.futures import Future

import pytest
import torch

from lean_laguna.core.config import EngineConfig
from lean_laguna.core.errors import CheckpointError, ConfigError
from lean_laguna.core.provenance import checkpoint_hash
from lean_laguna.core.types import SamplingParams
from lean_laguna.engine.llm_engine import LLMEngine
from lean_laguna.engine.loading import (
    engine_type,
    load_engine,
    resolve_device,
    resolve_dtype,
)
from lean_laguna.spec.proposer import DFlashProposer
from support.checkpoints import write_tiny_drafter, write_tiny_target
from support.engines import dflash, tiny_drafter, tiny_target


def test_auto_is_the_gpu_where_there_is_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_device("auto").type == resolve_device("cuda").type == "cuda"
    assert resolve_device("cpu").type == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto").type == "cpu"
    with pytest.raises(ConfigError, match="no CUDA device here; use 'cpu' or 'auto'"):
        resolve_device("cuda")


def test_auto_dtype_follows_the_device():
    assert resolve_dtype("auto", torch.device("cpu")) == torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype("bfloat16", torch.device("cpu")) == torch.bfloat16
    assert resolve_dtype("float32", torch.device("cuda")) == torch.float32


def test_names_are_resolved_before_weights_are_read(tmp_path, monkeypatch):
    write_tiny_target(tmp_path / "target")
    monkeypatch.setattr(
        "lean_laguna.engine.loading.load_laguna", lambda *a, **k: pytest.fail("read the weights")
    )
    given = {"model": str(tmp_path / "target"), "speculative": {"model": str(tmp_path / "nothing")}}
    with pytest.raises(CheckpointError, match="nothing"):
        load_engine(EngineConfig.from_dict(given))


def test_a_drafter_as_the_model_and_a_drafter_of_another_target_are_told_before_weights_are_read(
    tmp_path, monkeypatch
):
    write_tiny_target(tmp_path / "target")
    config = write_tiny_drafter(tmp_path / "drafter") / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"hidden_size": 64}))
    monkeypatch.setattr(
        "lean_laguna.engine.loading.load_laguna", lambda *a, **k: pytest.fail("read the weights")
    )
    with pytest.raises(ConfigError, match=r"this is a drafter .* pass it as the speculative model"):
        load_engine(EngineConfig.from_dict({"model": str(tmp_path / "drafter")}))
    given = {"model": str(tmp_path / "target"), "speculative": {"model": str(tmp_path / "drafter")}}
    with pytest.raises(ConfigError, match="'hidden_size' is 64, but the target's is"):
        load_engine(EngineConfig.from_dict(given))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_keys_and_values_are_held_in_the_models_number_format(tmp_path, dtype):
    write_tiny_target(tmp_path / "target")
    write_tiny_drafter(tmp_path / "drafter")
    given = {
        "model": str(tmp_path / "target"),
        "speculative": {"model": str(tmp_path / "drafter"), "num_speculative_tokens": 3},
        "device": "cpu",
        "dtype": dtype,
        "max_num_seqs": 2,
    }
    engine, folder = load_engine(EngineConfig.from_dict(given))
    assert folder == tmp_path / "target"
    cache = engine._runner.kv_cache
    assert str(cache.dtype) == f"torch.{dtype}"
    storages = [cache.storage(g, i) for g, group in enumerate(cache.groups) for i in range(group.num_layers)]
    assert engine.kv_bytes == sum(storage.nbytes for storage in storages)
    assert [group.name for group in cache.groups] == ["full", "sliding", "draft_full", "draft_sliding"]


def test_a_gpu_without_the_kernels_is_said_to_be_slow_and_exact_up_to_near_ties_only(capsys):
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert engine_type(tiny_target(), dflash(), "auto", cpu) is LLMEngine
    assert capsys.readouterr().err == ""
    assert engine_type(tiny_target(), dflash(), "torch", gpu) is LLMEngine
    told = capsys.readouterr().err
    assert "slow" in told
    assert "near-tie" in told
    assert engine_type(tiny_target(), None, "torch", gpu) is LLMEngine
    told = capsys.readouterr().err
    assert "slow" in told
    assert "near-tie" not in told


def test_kernels_that_cannot_run_these_models_are_refused_by_reason():
    mixed = DFlashProposer(tiny_drafter(layers="SF"), tiny_target())
    with pytest.raises(ConfigError, match="not all of one kind"):
        engine_type(tiny_target(), mixed, "triton", torch.device("cpu"))


def test_dummy_weights_run_by_shape_and_are_never_passed_off_as_a_model(capsys):
    config = EngineConfig.from_dict(
        {"model": "nano", "load_format": "dummy", "shape": "nano", "max_model_len": 64, "device": "cpu"}
        | {"speculative": {"model": "nano-dflash", "num_speculative_tokens": 3}}
        | {"max_num_seqs": 1}
    )
    engine, _ = load_engine(config)
    assert config.is_synthetic
    assert "SYNTHETIC: random weights in the shape of nano" in capsys.readouterr().err
    state = engine.add_request([5, 6], SamplingParams(temperature=0, max_tokens=3))
    while engine.has_unfinished:
        engine.step()
    assert state.snapshot().outputs[0].text.startswith("<")


def test_a_drafter_is_of_the_kind_asked_for_and_quantised_if_asked(tmp_path):
    write_tiny_target(tmp_path / "target")
    write_tiny_drafter(tmp_path / "drafter")
    given = {"model": str(tmp_path / "drafter"), "method": "dspark"}
    config = {"model": str(tmp_path / "target"), "device": "cpu", "kernels": "torch"}
    with pytest.raises(ConfigError, match="is a dflash drafter; leave it out"):
        load_engine(EngineConfig.from_dict({**config, "speculative": given}))
    given = {**given, "method": "dflash", "quantization": "fp8"}
    engine, _ = load_engine(EngineConfig.from_dict({**config, "speculative": given}))
    assert engine.proposer.drafter.packed_weights


@pytest.mark.parametrize("given", [{"model": "target"}, {"load_format": "dummy", "shape": "target"}])
def test_weights_that_memory_cannot_hold_are_refused_before_they_are_read(given, tmp_path, monkeypatch):
    write_tiny_target(tmp_path / "target")
    given = {key: str(tmp_path / value) if value == "target" else value for key, value in given.items()}
    size = sum(p.numel() for p in tiny_target().parameters())
    for name in ("load_laguna", "dummy_target"):
        monkeypatch.setattr(f"lean_laguna.engine.loading.{name}", lambda *a, **k: pytest.fail("took memory"))
    monkeypatch.setattr("lean_laguna.engine.loading.free_memory_bytes", lambda device: 3 * size)
    with pytest.raises(ConfigError, match=r"GB as float32, and .* GB of memory are free; --dtype bfloat16"):
        load_engine(EngineConfig.from_dict(given | {"device": "cpu"}))
    with pytest.raises(pytest.fail.Exception, match="took memory"):
        load_engine(EngineConfig.from_dict(given | {"device": "cpu", "dtype": "bfloat16"}))


def test_a_drafter_of_another_checkpoint_is_told_once_and_served(tmp_path, capsys):
    target, drafter = write_tiny_target(tmp_path / "target"), write_tiny_drafter(tmp_path / "drafter")
    config = drafter / "config.json"
    written = json.loads(config.read_text())
    given = EngineConfig.from_dict({"model": str(target), "speculative": {"model": str(drafter)}})

    def told(provenance):
        config.write_text(json.dumps(written | {"provenance": provenance}))
        engine, _ = load_engine(given)
        assert engine.proposer is not None
        return capsys.readouterr().err

    assert told({}) == told({"target_sha256": checkpoint_hash(target)}) == told({"target_sha256": 3}) == ""
    line = told({"target_sha256": "ab" * 32})
    assert line.count("\n") == 1
    assert f"{drafter}: was trained for another target than {target}" in line
    assert "abababababab" in line
    assert checkpoint_hash(target)[:12] in line


def test_a_drafter_that_has_gone_by_the_time_a_hash_is_known_is_still_told_of(tmp_path, monkeypatch, capsys):
    target, drafter = write_tiny_target(tmp_path / "target"), write_tiny_drafter(tmp_path / "drafter")
    config = drafter / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"provenance": {"target_sha256": "ab"}}))
    hashed = Future()
    monkeypatch.setattr("lean_laguna.engine.loading._hash_meanwhile", lambda folder: hashed)
    monkeypatch.setattr("lean_laguna.engine.loading._PATIENCE_S", 0.0)
    load_engine(EngineConfig.from_dict({"model": str(target), "speculative": {"model": str(drafter)}}))
    assert capsys.readouterr().err == ""
    config.unlink()
    hashed.set_result("cd")
    err = capsys.readouterr().err
    assert f"{drafter}: was trained for another target than {target}" in err
    assert err.count("\n") == 1


def test_the_packaged_drafters_are_of_the_packaged_target(capsys):
    for drafter in ("nano-dflash", "nano-dspark"):
        load_engine(EngineConfig.from_dict({"model": "nano", "speculative": {"model": drafter}}))
    assert capsys.readouterr().err == ""
