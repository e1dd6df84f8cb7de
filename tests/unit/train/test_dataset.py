import json

import pytest
import torch

from lean_laguna.core.errors import DataError
from lean_laguna.train.dataset import RowSampler, load_meta, load_tokens, validation_rows


def test_tokens_survive_the_disk_and_damage_is_found(data, tmp_path):
    tokens = load_tokens(data, "train")
    assert len(tokens) == load_meta(data)["tokens"]["train"]
    for name in ("meta.json", "train.u16.xz"):
        (tmp_path / name).write_bytes((data / name).read_bytes())
    whole = (tmp_path / "train.u16.xz").read_bytes()
    (tmp_path / "train.u16.xz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="damaged"):
        load_tokens(tmp_path, "train")
    (tmp_path / "train.u16.xz").write_bytes((data / "val.u16.xz").read_bytes())
    with pytest.raises(DataError, match="checksum"):
        load_tokens(tmp_path, "train")
    with pytest.raises(DataError, match="missing"):
        load_tokens(tmp_path, "val")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"tokens": {', r"meta\.json' is damaged"),
        ("[1]", r"meta\.json' lacks 'tokens'"),
        (
            '{"tokens": {}, "sha256": {}, "vocab_size": 3}',
            r"meta\.json' lacks 'chars_per_token'; make it anew",
        ),
    ],
)
def test_a_damaged_meta_is_named(tmp_path, text, message):
    (tmp_path / "meta.json").write_text(text)
    with pytest.raises(DataError, match=message):
        load_meta(tmp_path)


def test_every_epoch_covers_the_stream_once_in_another_order():
    tokens = torch.arange(1000, dtype=torch.int32)
    sampler = RowSampler(tokens, seq_len=10, batch_rows=4, seed=0)
    epochs = []
    for epoch in range(2):
        steps = range(epoch * sampler.steps_per_epoch, (epoch + 1) * sampler.steps_per_epoch)
        rows = torch.cat([sampler.rows(step) for step in steps])
        assert (rows[:, 1:] - rows[:, :-1] == 1).all()
        starts = rows[:, 0].tolist()
        assert len(set(starts)) == len(starts)
        epochs.append(starts)
    assert epochs[0] != epochs[1]
    assert torch.equal(sampler.rows(3), RowSampler(tokens, 10, 4, 0).rows(3))


def test_too_few_tokens_are_an_error():
    with pytest.raises(DataError, match="too few"):
        RowSampler(torch.arange(20, dtype=torch.int32), seq_len=10, batch_rows=4, seed=0)


def test_validation_rows_do_not_overlap():
    rows = torch.cat(list(validation_rows(torch.arange(101, dtype=torch.int32), 10, 1000)))
    assert rows[:, 1:].flatten().tolist() == list(range(1, 101))
    assert len(list(validation_rows(torch.arange(101, dtype=torch.int32), 10, 30))) == 3


def test_meta_knows_the_characters_of_each_token(data):
    meta = json.loads((data / "meta.json").read_text())
    assert len(meta["chars_per_token"]) == meta["vocab_size"]
    assert sum(meta["chars_per_token"][:32]) == 0
