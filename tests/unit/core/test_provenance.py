import json
import os

import pytest

from lean_laguna.core import provenance
from lean_laguna.core.provenance import checkpoint_hash, describe_run, git_commit, library_versions, machine


@pytest.fixture
def checkpoint(tmp_path, monkeypatch):
    monkeypatch.setenv("LEAN_LAGUNA_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def test_a_run_is_described_in_json(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/some/where/lean-laguna", "bench", "--repeats", "3"])
    facts = json.loads(json.dumps(describe_run()))
    assert facts["argv"] == ["lean-laguna", "bench", "--repeats", "3"]
    assert facts["versions"]["torch"]
    assert facts["machine"]["num_cpus"] >= 1
    assert describe_run(["x"])["argv"] == ["x"]


def test_only_installed_libraries_have_a_version():
    versions = library_versions()
    assert versions["python"].startswith("3.")
    assert "no-such-library" not in versions
    assert None not in versions.values()


def test_a_machine_without_a_gpu_names_none(monkeypatch):
    monkeypatch.setattr(provenance, "_output_of", lambda command: None)
    assert "gpus" not in machine()


def test_gpus_carry_their_driver(monkeypatch):
    monkeypatch.setattr(provenance, "_output_of", lambda command: "NVIDIA H200, 143771 MiB, 580.1\n")
    assert machine()["gpus"] == [{"name": "NVIDIA H200", "memory": "143771 MiB", "driver": "580.1"}]


def test_the_commit_is_absent_outside_a_checkout(monkeypatch):
    monkeypatch.setattr(provenance, "_output_of", lambda command: None)
    assert git_commit() is None


def test_a_changed_tree_is_marked(monkeypatch):
    monkeypatch.setattr(provenance, "_output_of", lambda command: " M file" if "status" in command else "abc")
    assert git_commit() == "abc+dirty"


def test_the_commit_is_found_without_a_lock_in_anyone_s_checkout(monkeypatch):
    """A `git status` that takes one writes the index, and makes a commit meanwhile fail."""
    commands = []
    monkeypatch.setattr(provenance, "_output_of", lambda command: commands.append(command) or "abc")
    git_commit()
    assert commands
    assert all(command[:2] == ["git", "--no-optional-locks"] for command in commands)


def test_a_checkpoint_s_hash_follows_its_bytes_and_names(checkpoint):
    first = checkpoint_hash(checkpoint)
    assert checkpoint_hash(checkpoint) == first
    (checkpoint / "tokenizer.json").write_text("not part of it")
    assert checkpoint_hash(checkpoint) == first
    (checkpoint / "model.safetensors").write_bytes(b"Weights")
    os.utime(checkpoint / "model.safetensors", ns=(1, 1))
    assert checkpoint_hash(checkpoint) != first


def test_weights_are_hashed_once(checkpoint, monkeypatch):
    first = checkpoint_hash(checkpoint)
    monkeypatch.setattr(provenance, "sha256_file", lambda path: pytest.fail("read again"))
    assert checkpoint_hash(checkpoint) == first


def test_a_damaged_or_unwritable_cache_only_costs_time(checkpoint, tmp_path, monkeypatch):
    first = checkpoint_hash(checkpoint)
    for entry in (tmp_path / "cache" / "hashes").iterdir():
        entry.write_text("[")
    assert checkpoint_hash(checkpoint) == first
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LEAN_LAGUNA_CACHE", str(tmp_path / "file"))
    assert checkpoint_hash(checkpoint) == first
