"""A target whose quantised weights stay packed: banks and linears in place of parameters."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lean_laguna.core.errors import CheckpointError
from lean_laguna.models.quantised_reader import QuantisedReader
from lean_laguna.models.safetensors_reader import CheckpointReader
from lean_laguna.quant.packed import PackedWeight, bank, stack_rows


def pack_parameters(
    sources: Mapping[str, Sequence[tuple[str, Any]]], reader: CheckpointReader, device: torch.device | str
) -> dict[str, PackedWeight]:
    """Return the quantised weights of a checkpoint by parameter, on a device, bank by bank.

    Args:
        sources: Per parameter, the logical names it is made of, with their places: ``...`` or (expert, rows).
        reader: The checkpoint.
        device: Where the weights go.

    Raises:
        CheckpointError: Scales are unusable, or the experts of a bank are not stored alike.
    """
    if not isinstance(reader, QuantisedReader):
        return {}
    packed: dict[str, PackedWeight] = {}
    for parameter, pieces in sources.items():
        is_quantised = [reader.scheme_of(name) is not None for name, _ in pieces]
        if not any(is_quantised):
            continue
        if not all(is_quantised):
            odd = pieces[is_quantised.index(False)][0]
            raise CheckpointError(
                f"{reader.path}: '{odd}' is not quantised but others of its bank are; a bank is kept "
                "packed only where all its experts are stored alike"
            )
        try:
            packed[parameter] = _join(pieces, reader).to(device)
        except ValueError as error:
            raise CheckpointError(
                f"{reader.path}: the weights of '{parameter}' are not stored alike ({error}), so they cannot "
                "be kept packed"
            ) from None
    return packed


def materialise(model: nn.Module, device: torch.device | str, leave: Container[str] = ()) -> None:
    """Give every parameter and buffer on the ``meta`` device storage, but for those named in ``leave``."""
    made: dict[int, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if name in leave or not parameter.is_meta:
            continue
        if id(parameter) not in made:  # tied weights stay one parameter
            empty = torch.empty_like(parameter, device=device)
            made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, made[id(parameter)])


def _join(pieces: Sequence[tuple[str, Any]], reader: QuantisedReader) -> PackedWeight:
    if len(pieces) == 1:
        return reader.packed(pieces[0][0])
    experts: dict[int, list[PackedWeight]] = {}
    for name, (expert, _) in pieces:
        experts.setdefault(expert, []).append(reader.packed(name))
    return bank([stack_rows(parts) for parts in experts.values()])
