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
