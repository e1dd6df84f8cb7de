"""Plain PyTorch beside the kernels, at a real model's sizes: relative errors in float64's norm."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lean_laguna.kernels.triton.attention import attend
from lean_laguna.kernels.triton.expert_down import expert_down
from lean_laguna.kernels.triton.experts import expert_gate_up
from lean_laguna.kernels.triton.head import sample
from lean_laguna.kernels.triton.launch import MAX_ROWS, Launch
from lean_laguna.kernels.triton.projection import gate_up, project
from lean_laguna.kernels.triton.step import rows_of


def relative(got: Tensor, want: Tensor) -> float:
    """Return |got - want| / |want|; infinite where anything is not finite."""
    error = (got.double() - want.double()).norm() / want.double().norm()
    return round(error.item(), 6) if bool(got.isfinite().all()) else float("inf")


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    scaled = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
    return scaled * weight


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return (x.float() @ weight.float().T).to(x.dtype)


def silu_and_mul(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    c, s = cos[:, None], sin[:, None]
    return torch.cat((a * c + -b * s, b * c + a * s, rest), -1)


def check_all(bench: Any) -> dict[str, float]:
    """Check every class at 1, 7 and, with 16 columns, 13 rows, with and without early launch."""
    torch.backends.cuda.matmul.allow_tf32 = False
    errors: dict[str, float] = {}
    for rows, cols, pdl in ((1, 8, False), (7, 8, True), (13, 16, True)):
        launch = bench.launch(cols, pdl)
        for i in (0, 1, 4) if bench.shape.layers > 4 else (0, 1):
            for name, error in check_layer(bench, i, rows, launch).items():
                errors[name] = max(errors.get(name, 0.0), error)
    return errors


def check_layer(bench: Any, i: int, rows: int, launch: Launch) -> dict[str, float]:
    """Check each kernel of one layer on fresh inputs and poisoned outputs."""
    s, layer, tiles = bench.shape, bench.weights.layers[i], bench.tiles
    a, shape = layer.attention, layer.attention.shape
    n = torch.tensor([rows], dtype=torch.int32, device=bench.device)
    hidden = bench.maker.normal(MAX_ROWS, s.hidden, scale=1.0)
    errors = {}

    def poisoned(*size: int) -> Tensor:
        return torch.full(size, float("nan"), dtype=bench.dtype, device=bench.device)

    qkv = poisoned(MAX_ROWS, shape.width)
    project(hidden, a.qkv, qkv, n, tiles.qkv, launch, norm=a.input_norm, eps=1e-6)
    errors["qkv"] = relative(qkv[:rows], linear(rms_norm(hidden, a.input_norm), a.qkv)[:rows])

    heads, at = poisoned(MAX_ROWS, shape.num_heads * shape.head_dim), bench.context - 40
    bench.place([rows], [at])
    bench.scratch.partial[0].fill_(float("nan"))
    attend(
        qkv,
        heads,
        (a.q_norm, a.k_norm),
        layer.rotary,
        bench.caches.layers[i],
        bench.caches.tables[i],
        bench.inputs.rows,
        bench.scratch.partial,
        shape,
        launch,
        eps=1e-6,
    )
    errors["attention"] = relative(heads[:rows], plain_attention(bench, i, qkv[:rows], at))

    y = poisoned(MAX_ROWS, s.hidden)
    heads.normal_()
    project(heads, a.out, y, n, tiles.out, launch, residual=hidden)
    errors["out"] = relative(y[:rows], (hidden + linear(heads, a.out))[:rows])
    if i == 0:
        return (
            errors
            | check_dense(bench, layer.mlp, hidden, rows, n, launch, poisoned)
            | check_head(bench, rows, n, launch)
        )
    return errors | check_sparse(bench, layer.mlp, hidden, rows, n, launch, poisoned)


def plain_attention(bench: Any, i: int, qkv: Tensor, at: int) -> Tensor:
    layer = bench.weights.layers[i]
    shape, rows = layer.attention.shape, qkv.shape[0]
    H, J, P = shape.num_heads, shape.num_kv_heads, shape.head_dim
    q, _, _, gate = qkv.split([H * P, J * P, J * P, H], -1)
    positions = torch.arange(at, at + rows, device=qkv.device)
    cos, sin = (t[positions] for t in layer.rotary)
    q = rotate(rms_norm(q.reshape(rows, H, P), layer.attention.q_norm), cos, sin)
    everything = torch.arange(at + rows, device=qkv.device)
    block = bench.caches.tables[i][0, everything // 16].long()
    keys, values = (pages[block, everything % 16].float() for pages in bench.caches.layers[i])
    keys, values = (t.repeat_interleave(H // J, 1).transpose(0, 1) for t in (keys, values))
    scores = q.float().transpose(0, 1) @ keys.transpose(1, 2) * P**-0.5
    seen = everything[None] <= positions[:, None]
    if shape.window:
        seen &= positions[:, None] - everything[None] < shape.window
    y = (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ values).transpose(0, 1).to(qkv.dtype)
    return (y * F.softplus(gate.float()).to(y.dtype)[..., None]).reshape(rows, -1)


def check_dense(
    bench: Any, mlp: Any, hidden: Tensor, rows: int, n: Tensor, launch: Launch, poisoned: Any
) -> dict[str, float]:
    act = poisoned(MAX_ROWS, mlp.down.shape[1])
    gate_up(hidden, mlp.norm, mlp.gate_up, act, n, 1e-6, bench.tiles.dense_gate_up, launch)
    want = silu_and_mul(linear(rms_norm(hidden, mlp.norm), mlp.gate_up))
    return {"dense_gate_up": relative(act[:rows], want[:rows])}


def check_head(bench: Any, rows: int, n: Tensor, launch: Launch) -> dict[str, float]:
    x = bench.maker.normal(MAX_ROWS, bench.shape.hidden, scale=1.0)
    inputs = bench.inputs
    bench.logits.fill_(float("nan"))
    sample(
        x,
        bench.weights.head,
        bench.sampled,
        inputs.seeds,
        inputs.temperatures,
        inputs.rows.positions,
        n,
        bench.scratch.best,
        bench.tiles.head,
        launch,
        position_offset=1,
        logits=bench.logits,
    )
    wrong = (bench.sampled[:rows].long() != bench.logits[:rows].argmax(-1)).sum().item()
    want = linear(x[:rows], bench.weights.head)
    return {"head": relative(bench.logits[:rows], want), "head argmax mismatches": float(wrong)}


def check_sparse(
    bench: Any, mlp: Any, hidden: Tensor, rows: int, n: Tensor, launch: Launch, poisoned: Any
) -> dict[str, float]:
    s, tiles, routing = bench.shape, bench.tiles, bench.scratch.routing
    act, scores, normed = (
        poisoned(MAX_ROWS, s.shared),
        poisoned(MAX_ROWS, s.experts),
        poisoned(MAX_ROWS, s.hidden),
    )
    gate_up(
        hidden, mlp.norm, mlp.router_gate_up, act, n, 1e-6, tiles.router, launch, scores=scores, normed=normed
    )
    x = rms_norm(hidden, mlp.norm)
    both = linear(x, mlp.router_gate_up)
    errors = {
        "router": relative(scores[:rows], both[:rows, : s.experts]),
        "shared": relative(act[:rows], silu_and_mul(both[:rows, s.experts :])),
        "normed": relative(normed[:rows], x[:rows]),
    }
    routing.act.fill_(float("nan"))
    routing.slot_weights.fill_(float("nan"))
    expert_gate_up(
        normed, scores, mlp.bias, mlp.gate_up, routing, n, tiles.expert_gate_up, launch, top_k=s.top_k
    )
    sigmoid = torch.sigmoid(scores[:rows].float())
    ids = torch.sort(sigmoid + mlp.bias, dim=-1, descending=True, stable=True)[1][:, : s.top_k]
    weights = sigmoid.gather(1, ids)
    weights = (weights / weights.sum(-1, keepdim=True)).to(bench.dtype).float()
    errors["expert id mismatches"] = float((routing.expert_ids[:rows].long() != ids).sum())
    y = hidden.clone()
    expert_down(
        routing,
        mlp.down,
        y,
        n,
        tiles.expert_down,
        launch,
        scaling=2.5,
        shared_act=act,
        shared_weight=mlp.shared_down,
    )
    want = torch.zeros(rows, s.hidden, device=bench.device)
    for r in range(rows):
        for k in ids[r].argsort():
            e = ids[r, k]
            middle = silu_and_mul(linear(normed[r : r + 1], mlp.gate_up[e]))
            want[r] += weights[r, k] * (middle.float() @ mlp.down[e].float().T)[0]
    mlp_out = want.to(bench.dtype) * 2.5 + linear(act[:rows], mlp.shared_down)
    errors["experts"] = relative(y[:rows] - hidden[:rows], mlp_out)
    return errors


__all__ = ["check_all", "rows_of"]
