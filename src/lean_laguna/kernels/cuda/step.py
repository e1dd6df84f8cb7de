"""All layers of a step in one CUDA C++ launch, token ids to the final norm: what fits, and its host side.

One block a multiprocessor, all running at once; blocks hand each other results through tagged words instead
of kernel boundaries, and read weights ahead across them. See ``step.cu``.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lean_laguna.kernels.cuda.compiler import Source
from lean_laguna.kernels.cuda.driver import multiprocessors, shared_memory
from lean_laguna.kernels.cuda.launching import launch_together
from lean_laguna.kernels.triton.formats import Weight
from lean_laguna.kernels.triton.launch import MAX_ROWS, cdiv
from lean_laguna.kernels.triton.rows import Rows
from lean_laguna.kernels.triton.weights import DenseWeights, LayerWeights, SparseWeights

WARPS = 8
THREADS = 32 * WARPS
ITEM_BYTES = THREADS * 16
HEAD_DIM = 128
NEAR_SPLITS = 16
LAYER_BYTES = 192
MAX_RING = 16
"""Items of 4 KiB a block reads ahead: more brought nothing."""
CHUNK = 128
"""Keys staged at a time, and keys of a split in a window; half of it where shared memory is small."""
SMALL_SHARED = 160 << 10
NEAR_KEYS, FAR_KEYS = 256, 1024
"""Keys of one of the first NEAR_SPLITS splits of a full context, and of a later one."""
PATIENCE = 20_000_000
"""Polls of one thread in one step before it gives up: many seconds."""
STATE_INTS = 16
STUCK = 4
"""Where the state says that something was waited for in vain, and after it block, layer, phase and thread."""


def _attention_fits(layer: LayerWeights) -> bool:
    shape = layer.attention.shape
    return (
        shape.head_dim == HEAD_DIM
        and shape.rotary_dim in (32, 64, 128)
        and shape.num_heads % shape.num_kv_heads == 0
        and shape.num_heads // shape.num_kv_heads <= MAX_ROWS
        and shape.width % 8 == 0
    )


def _mixture(mlp: SparseWeights) -> tuple[int, int, int, int, bool, bool]:
    """Return what all sparse layers must share: E, A, F, FS, softcap or not, norm_topk."""
    experts, _, f = mlp.down.shape
    return experts, mlp.top_k, f, mlp.shared_down.shape[1], mlp.softcap > 0, mlp.norm_topk


def _lengths(layers: Sequence[LayerWeights]) -> list[int]:
    """Return the row lengths K of all products that add to the residual stream."""
    found = [layer.attention.out.shape[1] for layer in layers]
    for layer in layers:
        mlp = layer.mlp
        found += [mlp.down.shape[-1]] + ([mlp.shared_down.shape[1]] if isinstance(mlp, SparseWeights) else [])
    return found


def _weights(layer: LayerWeights) -> list[Weight]:
    mlp = layer.mlp
    found = [layer.attention.qkv, layer.attention.out, mlp.gate_up, mlp.down]
    return [*found, mlp.router_gate_up, mlp.shared_down] if isinstance(mlp, SparseWeights) else found


def _is_plain(layer: LayerWeights) -> bool:
    attention, mlp = layer.attention, layer.mlp
    if isinstance(mlp, SparseWeights) and mlp.shared_gate_up is not None:
        return False
    return attention.gate is None and all(isinstance(weight, Tensor) for weight in _weights(layer))


def fits_step(layers: Sequence[LayerWeights]) -> bool:
    """Say whether ``StepKernel`` takes these layers, all of them: BF16, one hidden size, one mixture."""
    if not all(_is_plain(layer) for layer in layers):
        return False
    first = layers[0].attention
    mixtures = {_mixture(layer.mlp) for layer in layers if isinstance(layer.mlp, SparseWeights)}
    dense = [layer.mlp.down.shape[1] for layer in layers if isinstance(layer.mlp, DenseWeights)]
    return (
        all(_attention_fits(layer) for layer in layers)
        and len({layer.attention.shape.num_kv_heads for layer in layers}) == 1
        and all(layer.attention.qkv.dtype == torch.bfloat16 for layer in layers)
        and first.qkv.shape[1] % 512 == 0
        and first.qkv.shape[1] <= 4096
        and all(k % 256 == 0 for k in _lengths(layers))
        and all(width % 4 == 0 for width in dense)
        and len(mixtures) <= 1
        and all(e % 32 == 0 and e <= 256 and a <= 32 and f == fs for e, a, f, fs, *_ in mixtures)
    )


def _log(keys: int) -> int:
    return keys.bit_length() - 1


def _splits(layer: LayerWeights, chunk: int) -> tuple[int, int, int]:
    """Return log2 of the keys of near and far splits, and how many partial sums a row can leave."""
    window, limit = layer.attention.shape.window, layer.rotary[0].shape[0]
    if window:
        return _log(chunk), _log(chunk), cdiv(window + MAX_ROWS, chunk) + 1
    near = min(cdiv(limit, NEAR_KEYS), NEAR_SPLITS)
    far = cdiv(max(0, limit - NEAR_SPLITS * NEAR_KEYS), FAR_KEYS)
    return _log(NEAR_KEYS), _log(FAR_KEYS), near + far


@dataclass(frozen=True)
class Workspace:
    """What the steps of one engine, which never run at once, share.

    Attributes:
        mail: int32, tagged words between blocks.
        parts: int32, partial sums of attention.
        state: [STATE_INTS] int32: tags used so far, and where something was waited for in vain.
    """

    mail: Tensor
    parts: Tensor
    state: Tensor

    @classmethod
    def allocate(cls, layers: Sequence[LayerWeights], device: torch.device | str) -> Workspace:
        """Return what is enough for steps over any of these layers, of up to MAX_ROWS rows."""
        D = layers[0].attention.qkv.shape[1]
        words, parts = 0, 0
        for layer in layers:
            shape = layer.attention.shape
            parts = max(
                parts, MAX_ROWS * shape.num_heads * _splits(layer, CHUNK // 2)[2] * (HEAD_DIM + 2) * 2
            )
        width, heads, act, experts, _ = _widths(layers)
        words = MAX_ROWS * (2 * D + width + heads + act + experts)

        def zeros(n: int) -> Tensor:
            return torch.zeros(n, dtype=torch.int32, device=device)

        return cls(zeros(words), zeros(parts), zeros(STATE_INTS))

    def complaint(self) -> str | None:
        """Return where a step waited in vain, or None: for tests and benchmarks, it waits for the device."""
        stuck, block, layer, phase, thread = self.state[STUCK : STUCK + 5].tolist()
        return f"block {block}, layer {layer}, phase {phase}, thread {thread}" if stuck else None


def _widths(layers: Sequence[LayerWeights]) -> tuple[int, int, int, int, int]:
    """Return the widest qkv row, row of heads, row of activations, and E and FS."""
    sparse = [layer.mlp for layer in layers if isinstance(layer.mlp, SparseWeights)]
    acts = [layer.mlp.down.shape[1] for layer in layers if isinstance(layer.mlp, DenseWeights)]
    acts += [(mlp.top_k + 1) * mlp.down.shape[2] for mlp in sparse]
    return (
        max(layer.attention.shape.width for layer in layers),
        max(layer.attention.out.shape[1] for layer in layers),
        max(acts),
        max((mlp.down.shape[0] for mlp in sparse), default=0),
        max((mlp.shared_down.shape[1] for mlp in sparse), default=0),
    )


class StepKernel:
    """Runs all layers of a target or a drafter on static buffers; what a CUDA graph captures."""

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        embed: Tensor,
        norm: Tensor,
        caches: Sequence[tuple[Tensor, Tensor]],
        tables: Sequence[Tensor],
        input_ids: Tensor,
        rows: Rows,
        normed: Tensor,
        workspace: Workspace,
        *,
        eps: float,
        cols: int = MAX_ROWS,
        taps: Sequence[Tensor | None] = (),
        options: dict[str, int] | None = None,
    ):
        """Describe the layers to the kernel, once.

        Args:
            layers: For which ``fits_step`` holds.
            embed: [V, D].
            norm: [D] final norm.
            caches: Keys and values of each layer, [num_blocks, kv_block_size, J, P] each.
            tables: [MAX_ROWS, .] int32 block table of each layer.
            input_ids: [MAX_ROWS] int32.
            rows: Where the rows stand.
            normed: [MAX_ROWS, D], written.
            workspace: Shared with other steps over these or other layers.
            eps: RMSNorm epsilon.
            cols: Token columns, 8 (steps of at most 8 rows) or 16.
            taps: [MAX_ROWS, D] for each layer, any row stride, written with its output; or None.
            options: Constants to use instead of the chosen ones: RING, GROUP, CHUNK, TIMED.
        """
        self._layers, self._workspace = tuple(layers), workspace
        self.cols = cols
        device = embed.device
        kv_block = caches[0][0].shape[1]
        limit = shared_memory(device)
        chunk = CHUNK if limit > SMALL_SHARED else CHUNK // 2
        constants = _constants(layers, kv_block, cols, {"CHUNK": chunk, **(options or {})})
        self.grid = _grid(layers, device)
        constants["PAIRS"] = cdiv(constants["D"], 16 * self.grid)
        fixed = _fixed_bytes(constants)
        ring = min((options or {}).get("RING", MAX_RING), (limit - fixed) // ITEM_BYTES)
        constants["RING"] = ring // constants["GROUP"] * constants["GROUP"]
        constants["SHARED_BYTES"] = self.shared_bytes = fixed + constants["RING"] * ITEM_BYTES
        self.source = Source.of("step", **constants)
        taps = taps or (None,) * len(layers)
        described = [
            _described(layer, cache, table, tap, constants["CHUNK"])
            for layer, cache, table, tap in zip(layers, caches, tables, taps, strict=True)
        ]
        self._description = (
            torch.frombuffer(bytearray(b"".join(described)), dtype=torch.uint8).clone().to(device)
        )
        self._kept = (caches, tables, taps)
        self.stamps = (
            torch.zeros(self.grid, len(layers), 16, dtype=torch.int64, device=device)
            if "TIMED" in constants
            else None
        )
        self._arguments = (
            self._description,
            workspace.mail,
            workspace.mail.numel(),
            workspace.parts,
            workspace.state,
            self.stamps,
            embed,
            input_ids,
            norm,
            normed,
            rows.num_rows,
            rows.num_requests,
            rows.row_start,
            rows.row_count,
            rows.positions,
            float(eps),
            HEAD_DIM**-0.5 * 1.4426950408889634,
        )

    def run(self) -> None:
        """Launch the step: from ``input_ids`` to ``normed``, K/V appended, taps written."""
        launch_together(self.source, self.grid, THREADS, self.shared_bytes, self._arguments)


def _grid(layers: Sequence[LayerWeights], device: torch.device) -> int:
    """Return how many blocks run: each must have a share of both halves' first products."""
    units = [layer.attention.shape.width // 8 for layer in layers]
    for layer in layers:
        mlp = layer.mlp
        if isinstance(mlp, SparseWeights):
            units.append(
                mlp.down.shape[0] // 8 + (mlp.shared_down.shape[1] + mlp.top_k * mlp.down.shape[2]) // 4
            )
        else:
            units.append(mlp.down.shape[1] // 4)
    return min(*units, multiprocessors(device))


def _constants(
    layers: Sequence[LayerWeights], kv_block: int, cols: int, options: dict[str, int]
) -> dict[str, int]:
    D, lengths = layers[0].attention.qkv.shape[1], _lengths(layers)
    width, heads, act, experts, shared = _widths(layers)
    group = 4 if D % 1024 == 0 and all(k % 512 == 0 for k in lengths) else 2
    constants = {
        "D": D,
        "J": layers[0].attention.shape.num_kv_heads,
        "KV_BLOCK": kv_block,
        "COLS": cols,
        "LAYERS": len(layers),
        "GROUP": group,
        "WIDTH": width,
        "HEADS": heads,
        "ACT": act,
        "E": experts,
        "FS": shared,
        "PATIENCE": PATIENCE,
    }
    for layer in layers:
        if isinstance(layer.mlp, SparseWeights):
            _, a, f, _, softcap, norm_topk = _mixture(layer.mlp)
            constants |= {"A": a, "F": f, "SOFTCAP": softcap, "NORM_TOPK": norm_topk}
            break
    return constants | options


def _fixed_bytes(c: dict[str, int]) -> int:
    """Return at least what ``struct Shared`` takes beside the ring."""
    cols, chunk, top_k = c["COLS"], c["CHUNK"], c.get("A", 0)
    staged = (2 * chunk + 16) * (HEAD_DIM + 8) * 2 + 16 * (chunk + 8) * 2
    staged = max(staged, cols * (top_k + 1) * c.get("F", 0) * 2)
    sums = (max(2 * 16, (4 if cols > 8 else 8) * 8) + c["PAIRS"] * 2) * WARPS * cols * 4
    small = 3 * WARPS * 16 * 4 + WARPS * (32 + 32 * 8) + 3 * 16 * 4 + 256
    slots = min(c["E"], cols * top_k)
    routing = 128 + slots * (1 + cols + 4 * cols) + cols * top_k * 5 if c["E"] else 0
    return cdiv(staged + sums + small + c["LAYERS"] * LAYER_BYTES + routing, 16) * 16


def _described(
    layer: LayerWeights, cache: tuple[Tensor, Tensor], table: Tensor, tap: Tensor | None, chunk: int
) -> bytes:
    """Pack ``struct Layer`` of step_types.cuh."""
    attention, mlp, shape = layer.attention, layer.mlp, layer.attention.shape
    qkv, out, gate_up, down, *more = (weight for weight in _weights(layer) if isinstance(weight, Tensor))
    tensors: list[Tensor | None] = [attention.input_norm, qkv, attention.q_norm, attention.k_norm]
    tensors += [*layer.rotary, *cache, table, out, mlp.norm]
    softcap = scaling = 0.0
    dense = 0
    if isinstance(mlp, SparseWeights):
        router, shared_down = more
        tensors += [router, gate_up, down, shared_down, mlp.bias]
        softcap, scaling = float(mlp.softcap), float(mlp.scaling)
    else:
        tensors += [None, gate_up, down, None, None]
        dense = down.shape[1]
    tensors.append(tap)
    near, far, splits = _splits(layer, chunk)
    return struct.pack(
        "<17Q10i4B2fI",
        *(0 if t is None else t.data_ptr() for t in tensors),
        shape.width,
        shape.num_heads,
        shape.rotary_dim,
        shape.window,
        table.stride(0),
        0 if tap is None else tap.stride(0),
        dense,
        near,
        far,
        splits,
        shape.causal,
        shape.has_qk_norm,
        shape.has_gate,
        isinstance(mlp, SparseWeights),
        softcap,
        scaling,
        65536 // (shape.num_heads // shape.num_kv_heads) + 1,
    )
