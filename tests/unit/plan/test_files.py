"""Whole folders pass; each kind of damage is named."""

import hashlib
import json

import pytest

from lean_laguna.plan.files import INDEX, check_hashes, missing_tensors, published_sha256, read_files
from lean_laguna.plan.inventory import scheme_lookup
from lean_laguna.quant.config import read_quantization
from support.engines import tiny_config
from support.sparse_checkpoints import NVFP4_EXPERTS, write_sparse_file, write_sparse_target


@pytest.fixture
def folder(tmp_path):
    return write_sparse_target(tmp_path / "model", tiny_config(), num_shards=3)


def shard(folder, i):
    return folder / f"model-{i:05}-of-00003.safetensors"


def test_a_whole_folder_has_no_problems(folder):
    files = read_files(folder)
    assert files.problems == ()
    assert len(files.shards) == 3
    assert files.num_bytes == sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert missing_tensors(tiny_config(), scheme_lookup(None), files.header) == []


def truncated(folder):
    with shard(folder, 2).open("r+b") as stream:
        stream.truncate(shard(folder, 2).stat().st_size - 7)


def without_index_and_shard(folder):
    (folder / INDEX).unlink()
    shard(folder, 2).unlink()


def wrong_place(folder):
    file = shard(folder, 1)
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    next(iter(header.values()))["shape"][0] += 1
    raw = json.dumps(header).encode()
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + data[8 + length :])


def extra_tensor(folder):
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    weight_map.pop("model.norm.weight")
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def lost_tensor(folder):
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    weight_map["model.more.weight"] = shard(folder, 1).name
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def twice(folder):
    (folder / INDEX).unlink()
    write_sparse_file(folder / "extra.safetensors", [("model.norm.weight", "BF16", (32,))])


def unfinished(folder):
    download = folder / ".cache" / "huggingface" / "download"
    download.mkdir(parents=True)
    (download / "abc.incomplete").write_bytes(b"")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncated, "model-00002-of-00003.safetensors: truncated"),
        (lambda f: shard(f, 2).unlink(), "model-00002-of-00003.safetensors: missing; the index promises"),
        (without_index_and_shard, "1 of 3 missing: 2"),
        (wrong_place, "does not fit its place in the file"),
        (extra_tensor, "does not list 1 tensors of the files, 'model.norm.weight' first"),
        (lost_tensor, "1 tensors of the index are not there, 'model.more.weight' first"),
        (twice, "'model.norm.weight' is also in extra.safetensors"),
        (unfinished, "abc.incomplete: a download that never ended"),
        (lambda f: (f / INDEX).write_text("{"), "cannot be read as a weight index"),
        (lambda f: [p.unlink() for p in f.glob("model*")], "no *.safetensors file"),
        (lambda f: shard(f, 1).write_text("version https://git-lfs.github.com/spec/v1"), "Git LFS pointer"),
    ],
)
def test_each_kind_of_damage_is_named(damage, said, folder):
    damage(folder)
    problems = read_files(folder).problems
    assert any(said in problem for problem in problems), problems
    assert not any(str(folder) in problem for problem in problems)


@pytest.mark.parametrize("damage", [truncated, wrong_place, lambda f: shard(f, 2).unlink()])
def test_what_follows_from_an_unread_file_is_not_told_too(damage, folder):
    damage(folder)
    files = read_files(folder)
    assert len(files.problems) == len(files.unread) == 1
    assert files.problems[0].startswith(files.unread[0])


def test_an_index_that_leads_out_of_its_folder_is_named(folder):
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "../b.safetensors"}}))
    assert (
        "names the file '../b.safetensors'; expected files of its own folder"
        in read_files(folder).problems[0]
    )


def test_an_unfinished_download_in_the_cache_of_hugging_face_is_named(tmp_path):
    snapshot = write_sparse_target(tmp_path / "snapshots" / "abc", tiny_config())
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "def.incomplete").write_bytes(b"")
    assert "def.incomplete" in read_files(snapshot).problems[0]


def test_what_the_config_describes_and_no_file_holds_is_named(folder):
    header = dict(read_files(folder).header)
    del (
        header["model.layers.2.mlp.experts.3.up_proj.weight"],
        header["model.layers.0.self_attn.q_proj.weight"],
    )
    header["model.norm.weight"] = {"shape": [31]}
    first, second = missing_tensors(tiny_config(), scheme_lookup(None), header)
    assert first == (
        "tensor 'layers.0.self_attn.q_proj.weight' and 1 more is missing; the config describes it"
    )
    assert "'norm.weight' has shape [31], expected [32]" in second


def test_a_quantised_module_needs_its_scales_too(tmp_path):
    folder = write_sparse_target(tmp_path, tiny_config(), quantization=NVFP4_EXPERTS)
    quantization = read_quantization(json.loads((folder / "config.json").read_text()), "config.json")
    header = dict(read_files(folder).header)
    assert missing_tensors(tiny_config(), scheme_lookup(quantization), header) == []
    del header["model.layers.2.mlp.experts.3.up_proj.weight_global_scale"]
    assert (
        "experts.3.up_proj.weight_global_scale' is missing"
        in missing_tensors(tiny_config(), scheme_lookup(quantization), header)[0]
    )


def test_fused_experts_are_not_missing(folder):
    header = {n: e for n, e in read_files(folder).header.items() if "experts." not in n or "bias" in n}
    assert missing_tensors(tiny_config(), scheme_lookup(None), header)
    for i in (1, 2, 3):
        header |= {
            f"model.layers.{i}.mlp.experts.{part}": {"shape": []} for part in ("gate_up_proj", "down_proj")
        }
    assert missing_tensors(tiny_config(), scheme_lookup(None), header) == []


def test_hashes_are_compared_with_what_the_download_left_behind(tmp_path, folder):
    digests = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.safetensors")
    }
    download = folder / ".cache" / "huggingface" / "download"
    download.mkdir(parents=True)
    one, two, three = sorted(digests)
    (download / f"{one}.metadata").write_text(f"commit\n{digests[one]}\n1.0\n")
    (download / f"{two}.metadata").write_text(f"commit\n{'0' * 64}\n1.0\n")
    (download / "damaged.metadata").write_bytes(b"commit\n\xff\n")
    assert published_sha256(folder / "damaged") is None
    seen = []
    found = check_hashes(read_files(folder), lambda done, total, name: seen.append((done, total, name)))
    assert found == {one: (digests[one], True), two: (digests[two], False), three: (digests[three], None)}
    assert seen == [(0, 3, one), (1, 3, two), (2, 3, three)]


def test_a_link_into_the_cache_names_its_hash(tmp_path):
    blob = tmp_path / ("a" * 64)
    blob.write_bytes(b"")
    link = tmp_path / "model.safetensors"
    link.symlink_to(blob)
    assert published_sha256(link) == "a" * 64
    assert published_sha256(blob) is None
