"""Parts converted into files that another has laid out."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from safetensors.torch import load_file

from lean_laguna.convert.part_converter import Conversion, Part, PartConverter
from lean_laguna.convert.quantize_plan import group_rules, make_plan, parse_scheme
from lean_laguna.convert.shard_layout import shard_layout
from lean_laguna.convert.shard_writer import ShardWriter
from lean_laguna.convert.source import open_source
from lean_laguna.quant.codec import encode
from support.quantised import write_target


def test_parts_by_two_converters_make_a_file(tmp_path: Path) -> None:
    source = open_source(write_target(tmp_path / "source"))
    schemes = make_plan(source, group_rules("attention", parse_scheme("fp8-channel")))
    (file,) = source.files()
    names = source.names_by_file()[file]
    writer = ShardWriter(tmp_path / file.name, shard_layout(source, names, schemes))
    conversion = Conversion(source, schemes, tmp_path, is_checked=True)
    # As another process gets it.
    sent = pickle.loads(pickle.dumps(conversion.portable()))
    converters = [PartConverter(conversion), PartConverter(sent)]
    errors = {}
    for i, name in enumerate(names):
        errors |= converters[i % 2].run(Part(file, (name,), 0))
    for converter in converters:
        converter.close()
    writer.finish()
    assert errors.keys() == schemes.keys()
    before, after = load_file(str(file)), load_file(str(tmp_path / file.name))
    for module, scheme in schemes.items():
        for part, expected in encode(before[f"{module}.weight"], scheme).items():
            found = after[f"{module}.{part}"].view(torch.uint8)
            assert torch.equal(found, expected.contiguous().view(torch.uint8))
    assert torch.equal(after["model.norm.weight"], before["model.norm.weight"])


def test_what_is_sent_leaves_out_the_logical_tensors_and_opens_its_own_files(tmp_path: Path) -> None:
    source = open_source(write_target(tmp_path / "source"))
    expected = source.tensors.get("model.norm.weight")
    sent = pickle.loads(pickle.dumps(Conversion(source, {}, tmp_path).portable()))
    assert sent.source.reader is sent.source.tensors
    assert torch.equal(sent.source.tensors.get("model.norm.weight"), expected)
