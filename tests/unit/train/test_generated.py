import pytest
import torch

from lean_laguna.core.errors import DataError
from lean_laguna.train.generated import Generated, load_generated, save_generated

CPU = torch.device("cpu")
TEXT = Generated(torch.arange(12, dtype=torch.int32).view(2, 6), torch.tensor([2, 3]), 0.8, 7, 40)


def test_text_comes_back_as_it_was(tmp_path):
    save_generated(TEXT, tmp_path / "text.pt")
    found = load_generated(tmp_path / "text.pt", CPU)
    assert torch.equal(found.tokens, TEXT.tokens)
    assert torch.equal(found.prefix_lengths, TEXT.prefix_lengths)
    assert (found.temperature, found.noise_seed, found.vocab_size) == (0.8, 7, 40)
    assert torch.equal(found.noise(0, 2), TEXT.noise(0, 2))


def test_a_damaged_file_is_named(tmp_path):
    path = tmp_path / "text.pt"
    path.write_bytes(b"rubbish")
    with pytest.raises(DataError, match=r"text\.pt' is damaged"):
        load_generated(path, CPU)


def test_noise_belongs_to_its_row():
    assert torch.equal(TEXT.noise(0, 2)[1], TEXT.noise(1, 2)[0])


def test_the_mask_begins_where_the_prefix_ends():
    assert TEXT.written_mask(slice(None)).tolist() == [[False] * 2 + [True] * 4, [False] * 3 + [True] * 3]
