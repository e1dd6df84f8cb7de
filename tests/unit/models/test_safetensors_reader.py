import json
import pickle

import pytest
import torch
from safetensors.torch import save_file

from lean_laguna.core.errors import CheckpointError
from lean_laguna.models.safetensors_reader import CheckpointReader


def write(folder, file="model.safetensors", **tensors):
    save_file(tensors, folder / file)
    return folder / file


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_one_file_is_read_by_name(tmp_path):
    a = torch.randn(2, 3).bfloat16()
    file = write(tmp_path, a=a, b=torch.zeros(4))
    for path in (tmp_path, file):
        reader = CheckpointReader(path)
        assert reader.names() == ["a", "b"]
        assert reader.shape("a") == (2, 3)
        assert reader.dtype_name("a") == "BF16"
        assert reader.file_of("b") == file
        assert torch.equal(reader.get("a"), a)
        reader.close()


def test_shards_are_read_as_one(tmp_path):
    write(tmp_path, "x-1.safetensors", a=torch.ones(1))
    write(tmp_path, "x-2.safetensors", b=torch.zeros(1))
    write(tmp_path, "consolidated.safetensors", a=torch.full((1,), 5.0))
    write_index(tmp_path, {"a": "x-1.safetensors", "b": "x-2.safetensors"})
    reader = CheckpointReader(tmp_path)
    assert reader.names() == ["a", "b"]
    assert reader.get("a").item() == 1


def test_files_of_any_name_will_do_without_an_index(tmp_path):
    write(tmp_path, "draft.safetensors", a=torch.ones(1))
    assert CheckpointReader(tmp_path).names() == ["a"]


def test_an_absent_shard_is_named(tmp_path):
    write(tmp_path, "x-1.safetensors", a=torch.ones(1))
    write_index(tmp_path, {"a": "x-1.safetensors", "b": "x-2.safetensors", "c": "x-2.safetensors"})
    with pytest.raises(CheckpointError, match=r"x-2\.safetensors: shard not found.*holds 2 tensors"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize("weight_map", [None, [], {"a": 5}])
def test_an_index_of_another_form_is_named(tmp_path, weight_map):
    write(tmp_path, "x-1.safetensors", a=torch.ones(1))
    write_index(tmp_path, weight_map)
    with pytest.raises(CheckpointError, match=r"index\.json: 'weight_map' must be an object"):
        CheckpointReader(tmp_path)


def test_a_tensor_absent_from_its_shard_is_named(tmp_path):
    write(tmp_path, "x-1.safetensors", a=torch.ones(1))
    write_index(tmp_path, {"a": "x-1.safetensors", "b": "x-1.safetensors"})
    with pytest.raises(CheckpointError, match=r"x-1\.safetensors: tensor 'b' is missing, though"):
        CheckpointReader(tmp_path)


def test_a_tensor_stored_twice_is_named(tmp_path):
    write(tmp_path, "x-1.safetensors", a=torch.ones(1))
    write(tmp_path, "x-2.safetensors", a=torch.ones(1))
    with pytest.raises(CheckpointError, match=r"x-2\.safetensors: tensor 'a' is also in x-1\.safetensors"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 40, -8])
def test_a_truncated_file_is_named_with_its_sizes(tmp_path, keep):
    file = write(tmp_path, a=torch.ones(100))
    data = file.read_bytes()
    file.write_bytes(data[:keep])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated"):
        CheckpointReader(tmp_path)
    file.write_bytes(data + b"more")
    with pytest.raises(CheckpointError, match=f"longer than its header says: found {len(data) + 4} bytes"):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize("header", [b"[]", b"{]"])
def test_a_file_of_another_kind_is_named(tmp_path, header):
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: not a safetensors file"):
        CheckpointReader(tmp_path)


def test_an_unknown_number_format_is_named(tmp_path):
    file = write(tmp_path, a=torch.ones(4))
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'"X32"'))
    with pytest.raises(CheckpointError, match=r"tensor 'a' has the unknown type 'X32'; known: BOOL, "):
        CheckpointReader(tmp_path)


def test_an_index_that_leads_out_of_its_folder_is_refused(tmp_path):
    (tmp_path / "model").mkdir()
    write(tmp_path, a=torch.ones(1))
    write_index(tmp_path / "model", {"a": "../model.safetensors"})
    with pytest.raises(CheckpointError, match=r"index\.json: names the file .*; expected files of its own"):
        CheckpointReader(tmp_path / "model")


def test_another_process_is_sent_no_open_files(tmp_path):
    write(tmp_path, a=torch.ones(4))
    reader = CheckpointReader(tmp_path)
    reader.get("a")
    assert torch.equal(pickle.loads(pickle.dumps(reader)).get("a"), torch.ones(4))


def test_a_broken_index_is_named(tmp_path):
    write(tmp_path, a=torch.ones(1))
    for text in ("{", "{}", '{"weight_map": 3}'):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(
            CheckpointError, match=r"index\.json: (cannot be read as JSON|'weight_map' must be an object)"
        ):
            CheckpointReader(tmp_path)


def test_a_folder_without_safetensors_says_what_is_there(tmp_path):
    with pytest.raises(CheckpointError, match="only safetensors are read; found none"):
        CheckpointReader(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"found pytorch_model\.bin"):
        CheckpointReader(tmp_path)
    with pytest.raises(CheckpointError, match="not found; expected a checkpoint folder"):
        CheckpointReader(tmp_path / "nowhere")


def test_a_link_to_an_index_that_never_came_is_no_reason_to_do_without_one(tmp_path):
    write(tmp_path, a=torch.zeros(1))
    (tmp_path / "model.safetensors.index.json").symlink_to(tmp_path / "blobs" / "abc")
    with pytest.raises(CheckpointError, match=r"index\.json: cannot be read as JSON: .*No such file"):
        CheckpointReader(tmp_path)
