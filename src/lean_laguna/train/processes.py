"""Several processes, one GPU each, as ``torchrun`` starts them: who this one is, and what they do together.

The drafter's weights, gradients and moments are sharded (FSDP2); the frozen target is whole in every process.
Rows of a batch are dealt out, so that a step reads what one process would read.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lean_laguna.core.errors import ConfigError
from lean_laguna.train.optimizer import AnyOptimizer


@dataclass(frozen=True)
class Processes:
    """The processes of a run.

    Attributes:
        rank: Which this one is.
        count: How many there are.
    """

    rank: int = 0
    count: int = 1

    @property
    def is_first(self) -> bool:
        """True for the one that writes files and reports."""
        return self.rank == 0

    def own(self, rows: Tensor) -> Tensor:
        """Return this process's share of rows, along the first dimension."""
        return rows[self.rank :: self.count]

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a value over all processes, without gradients."""
        if self.count == 1:
            return value
        total = value.detach().clone()
        dist.all_reduce(total)
        return total / self.count

    def agree(self, flag: bool) -> bool:
        """Return what the first process says."""
        if self.count == 1:
            return flag
        said = torch.tensor(float(flag), device="cuda" if dist.get_backend() == "nccl" else "cpu")
        dist.broadcast(said, 0)
        return bool(said)

    def wait(self) -> None:
        """Wait for the others."""
        if self.count > 1:
            dist.barrier()


def own_device(device: torch.device) -> torch.device:
    """Return the GPU that ``torchrun`` means this process to use, made the current one; else ``device``."""
    local = os.environ.get("LOCAL_RANK")
    if device.type != "cuda" or local is None:
        return device
    count = torch.cuda.device_count()
    if int(local) >= count:
        raise ConfigError(
            f"{int(local) + 1} processes or more were started on {count} GPUs; one each is needed"
        )
    torch.cuda.set_device(int(local))
    return torch.device("cuda", int(local))


def join(device: torch.device) -> Processes:
    """Join the processes that ``torchrun`` started; alone where it did not.

    Args:
        device: Of training, from :func:`own_device`.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        return Processes()
    if not dist.is_initialized():
        is_gpu = device.type == "cuda"
        dist.init_process_group("nccl" if is_gpu else "gloo", device_id=device if is_gpu else None)
    return Processes(dist.get_rank(), count)


def shard(module: nn.Module, device: torch.device, processes: Processes) -> None:
    """Shard a drafter's weights over the processes, in place; they are gathered for each pass.

    One group for all of it: a drafter's weights fit every card, its moments and gradients need not.
    """
    if processes.count == 1:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(device.type, (processes.count,))
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
    register_fsdp_forward_method(module, "forward_dense")


def whole_state(module: nn.Module, processes: Processes) -> dict[str, Tensor]:
    """Return a module's state with whole tensors; every process must call it."""
    if processes.count == 1:
        return module.state_dict()
    return {name: whole(value) for name, value in module.state_dict().items()}


def load_whole(module: nn.Module, state: dict[str, Tensor], processes: Processes) -> None:
    """Load a state of whole tensors into a module that may be sharded."""
    if processes.count == 1:
        module.load_state_dict(state)
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    set_model_state_dict(module, dict[str, Any](state), options=StateDictOptions(full_state_dict=True))


def whole_optimizer_state(module: nn.Module, optimizer: AnyOptimizer, processes: Processes) -> dict[str, Any]:
    """Return an optimiser's state with whole tensors; every process must call it."""
    if processes.count == 1:
        return optimizer.state_dict()
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    assert isinstance(optimizer, torch.optim.Optimizer)

    return get_optimizer_state_dict(module, optimizer, options=StateDictOptions(full_state_dict=True))


def load_optimizer_state(
    module: nn.Module, optimizer: AnyOptimizer, state: dict[str, Any], processes: Processes
) -> None:
    """Load what :func:`whole_optimizer_state` gave."""
    if processes.count == 1:
        optimizer.load_state_dict(state)
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    assert isinstance(optimizer, torch.optim.Optimizer)

    set_optimizer_state_dict(module, optimizer, state, options=StateDictOptions(full_state_dict=True))


def whole(value: Tensor) -> Tensor:
    """Return a tensor that may be sharded whole; every process must call it."""
    from torch.distributed.tensor import DTensor

    return value.full_tensor() if isinstance(value, DTensor) else value
