"""The tensors that a file of a source becomes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lean_laguna.convert.source import Source
from lean_laguna.quant.scheme import TensorSpec, WeightScheme

WEIGHT = ".weight"


def is_encoded(name: str, schemes: Mapping[str, WeightScheme]) -> bool:
    """Return whether a tensor of the source is a weight that gets quantised."""
    return name.endswith(WEIGHT) and name.removesuffix(WEIGHT) in schemes


def shard_layout(
    source: Source, names: Iterable[str], schemes: Mapping[str, WeightScheme]
) -> dict[str, TensorSpec]:
    """Return the tensors of a new file, in its order.

    Args:
        source: The checkpoint.
        names: Tensors of one of its files.
        schemes: Of the linears to quantise.
    """
    tensors = source.tensors
    specs: dict[str, TensorSpec] = {}
    for name in names:
        module, kind = name.removesuffix(WEIGHT), tensors.dtype_name(name)
        if is_encoded(name, schemes):
            parts = schemes[module].tensors(*source.shapes[module], scale_dtype=kind)
            specs |= {f"{module}.{part}": spec for part, spec in parts.items()}
        else:
            specs[name] = TensorSpec(tensors.shape(name), kind)
    # Wide types first, so that every tensor begins at a multiple of its element's size.
    return dict(sorted(specs.items(), key=lambda item: -item[1].element_bytes))
