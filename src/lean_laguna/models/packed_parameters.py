"""A target whose quantised weights stay packed: banks and linears in place of parameters."""

from __future__ import annotations

import sys
from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lean_laguna.models.quantised_reader import QuantisedReader
from lean_laguna.models.safetensors_reader import CheckpointReader
from lean_laguna.quant.packed import PackedWeight, bank, stack_rows

if TYPE_CHECKING:
    from lean_laguna.models.laguna import LagunaForCausalLM

_ALIGNMENT = 512
"""Bytes on which parameters start that share an allocation."""


def pack_parameters(
    sources: Mapping[str, Sequence[tuple[str, Any]]], reader: CheckpointReader, device: torch.device | str
) -> dict[str, PackedWeight]:
    """Return the quantised weights of a checkpoint by parameter, on a device, bank by bank.

    Args:
        sources: Per parameter, the logical names it is made of, with their places: ``...`` or (expert, rows).
        reader: The checkpoint.
        device: Where the weights go.

    Banks whose experts are not stored alike are left out, to be decoded; a line on stderr says so.

    Raises:
        CheckpointError: Scales are unusable.
    """
    if not isinstance(reader, QuantisedReader):
        return {}
    packed: dict[str, PackedWeight] = {}
    for parameter, pieces in sources.items():
        is_quantised = [reader.scheme_of(name) is not None for name, _ in pieces]
        if not any(is_quantised):
            continue
        try:
            if not all(is_quantised):
                raise ValueError(f"'{pieces[is_quantised.index(False)][0]}' is not quantised")
            packed[parameter] = _join(pieces, reader).to(device)
        except ValueError as error:
            print(
                f"lean-laguna: '{parameter}' is decoded in memory: experts not stored alike ({error})",
                file=sys.stderr,
            )
    return packed


def materialise(
    model: nn.Module,
    device: torch.device | str,
    leave: Container[str] = (),
    joint: Sequence[Sequence[str]] | None = None,
) -> None:
    """Give every parameter and buffer on the ``meta`` device storage, but for those named in ``leave``.

    Args:
        model: With parameters on the ``meta`` device.
        device: Where they go.
        leave: Names of those that stay there.
        joint: Names of parameters that are to lie side by side, group by group; then all parameters but the
            banks of experts share one allocation, so that nothing is ever moved and no piece is left unused.
            None gives each its own.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    waiting = {name: parameter for name, parameter in named if parameter.is_meta and name not in leave}
    places = {} if joint is None else _one_block(waiting, joint, device)
    made: dict[int, nn.Parameter] = {}
    for name, parameter in waiting.items():
        if id(parameter) not in made:  # tied weights stay one parameter
            empty = places.get(id(parameter))
            if empty is None:
                empty = torch.empty_like(parameter, device=device)
            made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, made[id(parameter)])


def _one_block(
    waiting: Mapping[str, nn.Parameter], joint: Sequence[Sequence[str]], device: torch.device | str
) -> dict[int, torch.Tensor]:
    """Return places in one new allocation, by the parameter's id; groups lie without gaps."""
    after = {name: group for group in joint for name in group if all(other in waiting for other in group)}
    offsets: dict[int, tuple[int, nn.Parameter]] = {}
    end = 0
    for first, parameter in waiting.items():
        if id(parameter) in offsets or parameter.dim() > 2:
            continue
        end = -(-end // _ALIGNMENT) * _ALIGNMENT
        for name in after.get(first, (first,)):
            offsets[id(waiting[name])] = end, waiting[name]
            end += waiting[name].nbytes
    block = torch.empty(end, dtype=torch.uint8, device=device)
    return {
        key: block[at : at + parameter.nbytes].view(parameter.dtype).view(parameter.shape)
        for key, (at, parameter) in offsets.items()
    }


def unpack_parameters(model: LagunaForCausalLM) -> None:
    """Decode the weights that were kept packed into parameters, one by one."""
    device = model.model.embed_tokens.weight.device
    for name in list(model.packed_weights):
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        empty = torch.empty_like(getattr(module, leaf), device=device)
        model.packed_weights.pop(name).decode_into(empty)
        setattr(module, leaf, nn.Parameter(empty, requires_grad=False))


def _join(pieces: Sequence[tuple[str, Any]], reader: QuantisedReader) -> PackedWeight:
    if len(pieces) == 1:
        return reader.packed(pieces[0][0])
    experts: dict[int, list[PackedWeight]] = {}
    for name, (expert, _) in pieces:
        experts.setdefault(expert, []).append(reader.packed(name))
    return bank([stack_rows(parts) for parts in experts.values()])
