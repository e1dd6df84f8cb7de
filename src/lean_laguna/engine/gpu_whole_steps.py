"""Target and drafter as one CUDA C++ launch each, from token ids to the final norm, where they fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from lean_laguna.kernels.cuda.step import StepKernel, Workspace, fits_step
from lean_laguna.kernels.triton.formats import Packed
from lean_laguna.kernels.triton.rows import Rows
from lean_laguna.kernels.triton.weights import LayerWeights

IS_FASTER = False
"""Whether these launches replace kernel after kernel where they fit: only if they measure faster."""


@dataclass(frozen=True)
class Pass:
    """What one model's launch reads and writes, on buffers that stay where they are.

    Attributes:
        layers: Decoder layers.
        norm: [D] final norm.
        caches: Keys and values of each layer first, then what else their format needs.
        tables: [MAX_ROWS, .] int32 block table of each layer.
        rows: Where the rows stand.
        eps: RMSNorm epsilon.
    """

    layers: Sequence[LayerWeights]
    norm: Tensor
    caches: Sequence[tuple[Any, ...]]
    tables: Sequence[Tensor]
    rows: Rows
    eps: float

    @property
    def fits(self) -> bool:
        """Whether one launch can run it."""
        has_plain_pages = all(cache[0].dtype == self.norm.dtype for cache in self.caches)
        return has_plain_pages and all(map(_is_plain, self.layers)) and fits_step(self.layers)


def _is_plain(layer: LayerWeights) -> bool:
    parts = [getattr(part, field.name) for part in (layer.attention, layer.mlp) for field in fields(part)]
    return not any(isinstance(part, Packed) for part in parts)


class WholeSteps:
    """The launches, made when first asked for; they share a workspace and never run at once.

    Attributes:
        names: Of the passes that fit.
    """

    def __init__(self, passes: Mapping[str, Pass], embed: Tensor, input_ids: Tensor, normed: Tensor):
        """Set the workspace aside for the passes that fit.

        Args:
            passes: By name.
            embed: [V, D], of the target.
            input_ids: [MAX_ROWS] int32.
            normed: [MAX_ROWS, D], written.
        """
        self._passes = {name: one for name, one in passes.items() if IS_FASTER and one.fits}
        self.names = frozenset(self._passes)
        layers = [layer for one in self._passes.values() for layer in one.layers]
        self._workspace = Workspace.allocate(layers, embed.device) if layers else None
        self._embed, self._input_ids, self._normed = embed, input_ids, normed
        self._kernels: dict[tuple[str, int, bool], StepKernel] = {}

    def launch(
        self, name: str, cols: int, taps: Mapping[int, Tensor] | None = None
    ) -> Callable[[], None] | None:
        """Return what runs a pass, or None where it does not fit.

        Args:
            name: Of the pass.
            cols: Token columns, 8 or 16.
            taps: By layer [MAX_ROWS, D], written with its output; always the same ones, or None.
        """
        if name not in self._passes or self._workspace is None:
            return None
        key, one = (name, cols, taps is not None), self._passes[name]
        if key not in self._kernels:
            self._kernels[key] = StepKernel(
                one.layers,
                self._embed,
                one.norm,
                [(keys, values) for keys, values, *_ in one.caches],
                one.tables,
                self._input_ids,
                one.rows,
                self._normed,
                self._workspace,
                eps=one.eps,
                cols=cols,
                taps=[(taps or {}).get(i) for i in range(len(one.layers))],
            )
        return self._kernels[key].run

    def check(self) -> None:
        """Wait for the device and make sure that no block has waited for another in vain.

        Raises:
            RuntimeError: One has; what the steps said is worth nothing.
        """
        complaint = self._workspace.complaint() if self._workspace is not None else None
        if complaint is not None:
            raise RuntimeError(f"a step of the CUDA C++ kernels got stuck: {complaint}; use --kernels triton")
