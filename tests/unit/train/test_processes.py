import pytest
import torch

from lean_laguna.core.errors import ConfigError
from lean_laguna.train.processes import Processes, own_device


def test_rows_are_dealt_out_whole():
    rows = torch.arange(6)
    dealt = [Processes(rank, 2).own(rows) for rank in range(2)]
    assert torch.equal(torch.cat(dealt).sort().values, rows)
    assert torch.equal(Processes().own(rows), rows)


def test_a_process_alone_agrees_with_itself():
    alone = Processes()
    assert alone.is_first
    assert alone.agree(True)
    assert float(alone.mean(torch.tensor(2.0))) == 2.0


def test_each_process_has_a_gpu_of_its_own(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    gpu = torch.device("cuda")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert own_device(gpu) == gpu
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert own_device(torch.device("cpu")) == torch.device("cpu")
    assert own_device(gpu) == torch.device("cuda", 1)
    assert chosen == [1]
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match="3 processes or more were started on 2 GPUs"):
        own_device(gpu)
