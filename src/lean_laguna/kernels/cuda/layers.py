"""Decoder layers of a step: parts that the CUDA C++ kernels fit through them, others through Triton's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lean_laguna.kernels.cuda import attention as cuda_attention
from lean_laguna.kernels.cuda import products, wide_experts
from lean_laguna.kernels.cuda.driver import collecting, compile_ahead
from lean_laguna.kernels.cuda.head import CudaHead
from lean_laguna.kernels.triton.attention import attend
from lean_laguna.kernels.triton.formats import Packed, Weight
from lean_laguna.kernels.triton.launch import MAX_ROWS, WIDE, Launch
from lean_laguna.kernels.triton.projection import gate_up, project
from lean_laguna.kernels.triton.step import Inputs, Scratch, project_qkv, rows_of, run_experts
from lean_laguna.kernels.triton.tiles import Tiles
from lean_laguna.kernels.triton.weights import DenseWeights, LayerWeights


class CudaLayers:
    """Runs layers.

    Made for layers of one dtype, BF16; a layer's parts that no kernel fits run on Triton. Which kernel a part
    takes depends on its shape alone.
    """

    def __init__(self, device: torch.device, kv_block: int = 16):
        """Find out what the device can do.

        Args:
            device: Where the weights are.
            kv_block: Keys of a page.
        """
        self._device = device
        self._attends = cuda_attention.has_clusters(device) and cuda_attention.fits_pages(kv_block)

    def attends_all(self, layers: Sequence[LayerWeights]) -> bool:
        """Say whether no layer's attention needs ``Scratch.partial``."""
        return self._attends and all(cuda_attention.fits_attention(layer.attention.shape) for layer in layers)

    def most_rows(self, layers: Sequence[LayerWeights]) -> int:
        """Return how many rows of a step these layers take at once: more than others where all is theirs."""
        return MAX_ROWS if self._attends and all(map(_takes_many, layers)) else WIDE

    def head(self, weight: Weight, most_rows: int) -> CudaHead | None:
        """Return what multiplies by a head [V, D] in steps of so many rows; None: Triton's kernel does."""
        if isinstance(weight, Packed) and most_rows <= WIDE and products.fits_project(weight):
            return CudaHead(weight)
        return None

    def compile_ahead(self, runs: Sequence[Callable[[], None]]) -> None:
        """Compile the runs' CUDA C++ kernels side by side; their Triton launches do happen."""
        with collecting() as sources:
            for run in runs:
                run()
        compile_ahead(sources, self._device)

    def __call__(
        self,
        layer: LayerWeights,
        cache: tuple[Tensor, Tensor],
        table: Tensor,
        inputs: Inputs,
        scratch: Scratch,
        tiles: Tiles,
        launch: Launch,
        *,
        eps: float,
        tap: Tensor | None = None,
    ) -> None:
        """Run one layer on ``scratch.hidden``, in place; see ``kernels.triton.step.run_layer``."""
        self._attend(layer, cache, table, inputs, scratch, tiles, launch, eps)
        mlp, hidden, n = layer.mlp, scratch.hidden, inputs.rows.num_rows
        if isinstance(mlp, DenseWeights):
            act = rows_of(scratch.act, mlp.down.shape[1])
            if products.fits_project(mlp.gate_up, gated=True):
                products.project(hidden, mlp.norm, mlp.gate_up, act, n, eps, launch, gated=True)
            else:
                gate_up(hidden, mlp.norm, mlp.gate_up, act, n, eps, tiles.dense_gate_up, launch)
            self._add(act, mlp.down, hidden, n, tiles, launch, tap)
        elif products.fits_experts(mlp):
            scores = rows_of(scratch.scores, mlp.bias.shape[0])
            act = rows_of(scratch.act, mlp.shared_down.shape[1])
            products.run_experts(
                mlp,
                hidden,
                scores,
                scratch.normed,
                act,
                scratch.routing,
                n,
                eps,
                launch,
                tap,
            )
        else:
            run_experts(mlp, n, scratch, tiles, launch, eps, tap)

    def _attend(
        self,
        layer: LayerWeights,
        cache: tuple[Tensor, Tensor],
        table: Tensor,
        inputs: Inputs,
        scratch: Scratch,
        tiles: Tiles,
        launch: Launch,
        eps: float,
    ) -> None:
        attention, hidden, rows = layer.attention, scratch.hidden, inputs.rows
        shape, n = attention.shape, rows.num_rows
        qkv = rows_of(scratch.qkv, shape.width)
        heads = rows_of(scratch.heads, shape.num_heads * shape.head_dim)
        if products.fits_project(attention.qkv) and attention.gate is None:
            products.project(hidden, attention.input_norm, attention.qkv, qkv, n, eps, launch)
        else:
            project_qkv(attention, hidden, qkv, n, tiles, launch, eps)
        norms = (attention.q_norm, attention.k_norm)
        if self._attends and cuda_attention.fits_attention(shape):
            cuda_attention.attend(
                qkv,
                heads,
                norms,
                layer.rotary,
                cache,
                table,
                rows,
                shape,
                launch,
                eps=eps,
            )
        else:
            attend(
                qkv, heads, norms, layer.rotary, cache, table, rows, scratch.partial, shape, launch, eps=eps
            )
        self._add(heads, attention.out, hidden, n, tiles, launch, None)

    @staticmethod
    def _add(
        x: Tensor, weight: Weight, hidden: Tensor, n: Tensor, tiles: Tiles, launch: Launch, tap: Tensor | None
    ) -> None:
        if products.fits_project_add(weight):
            products.project_add(x, weight, hidden, n, launch, tap)
        else:
            project(x, weight, hidden, n, tiles.out, launch, residual=hidden, tap=tap)


def _takes_many(layer: LayerWeights) -> bool:
    """Say whether the kernels here take all of a layer, and more than ``WIDE`` rows of it."""
    attention, mlp = layer.attention, layer.mlp
    weights = [attention.qkv, attention.out]
    weights += [mlp.gate_up, mlp.down] if isinstance(mlp, DenseWeights) else [mlp.router_gate_up]
    if attention.gate is not None or not all(isinstance(weight, Tensor) for weight in weights):
        return False
    fits = (
        cuda_attention.fits_attention(attention.shape)
        and products.fits_project(attention.qkv)
        and products.fits_project_add(attention.out)
    )
    if isinstance(mlp, DenseWeights):
        own = products.fits_project(mlp.gate_up, gated=True) and products.fits_project_add(mlp.down)
        return fits and own
    return fits and products.fits_experts(mlp) and wide_experts.fits(mlp)
