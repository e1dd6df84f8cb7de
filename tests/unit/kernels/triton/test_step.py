"""A step equals the plain model, verified rows equal decoded ones bit for bit, drafts change no token."""

import dataclasses

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; it comes with PyTorch's CUDA builds")

from lean_laguna.kernels.triton.accept import Requests, accept
from lean_laguna.kernels.triton.attention import AttentionShape
from lean_laguna.kernels.triton.draft_step import DraftStep, Features
from lean_laguna.kernels.triton.launch import Launch, Tile
from lean_laguna.kernels.triton.step import Caches, Inputs, Scratch, TargetStep
from lean_laguna.kernels.triton.tiles import Tiles
from lean_laguna.kernels.triton.weights import (
    AttentionWeights,
    DenseWeights,
    DrafterWeights,
    LayerWeights,
    SparseWeights,
    TargetWeights,
    rotary_tables,
)

D, J, P, V, EPS, MAX_LEN = 32, 2, 16, 40, 1e-6, 64
E, A, F, FS, DENSE = 6, 2, 16, 32, 32
FULL = AttentionShape(2, J, P, P // 2)
SLIDING = AttentionShape(4, J, P, P, window=7)
TILES = Tiles(**{f.name: Tile(32, 16, 2, 2, 2) for f in dataclasses.fields(Tiles)})
LAUNCH = Launch(programs=1, attention_programs=1)


class Model:
    """A tiny target with its caches and buffers, and a drafter of one sliding layer."""

    def __init__(self, draw, device, dtype):
        self.draw, self.device = draw, device
        inverse = 10000.0 ** -(torch.arange(P // 2, device=device) * 2 / P)
        self.tables = {
            FULL: rotary_tables(inverse[: P // 4], MAX_LEN, 1.2, dtype),
            SLIDING: rotary_tables(inverse, MAX_LEN, 1.0, dtype),
        }
        layers = (self.layer(FULL, self.dense()), self.layer(SLIDING, self.sparse()))
        self.target = TargetWeights(draw(V, D), layers, self.norm(D), draw(V, D, scale=D**-0.5), EPS)
        self.drafter = DrafterWeights(
            layers=(self.layer(SLIDING, self.dense()),),
            norm=self.norm(D),
            aux_norms=draw(2, D) * 0.1 + 1,
            fc=draw(D, 2 * D, scale=0.1),
            hidden_norm=self.norm(D),
            context_norms=draw(1, D) * 0.1 + 1,
            context_kv=draw(2 * J * P, D, scale=0.15),
            k_norms=draw(1, P) * 0.1 + 1,
            mask_token=12,
            eps=EPS,
        )
        self.scratch = Scratch.allocate(layers + self.drafter.layers, self.target.head, TILES)
        self.inputs = Inputs.allocate(device)
        self.taps = torch.zeros(16, 2, D, dtype=dtype, device=device)
        self.logits = torch.full((16, V), float("nan"), device=device)
        self.sampled = torch.zeros(16, dtype=torch.int32, device=device)
        table = torch.zeros(16, MAX_LEN // 4, dtype=torch.int32, device=device)
        table[0] = torch.randperm(MAX_LEN // 4, device=device) + 1
        self.table = table

    def norm(self, n):
        return self.draw(n) * 0.1 + 1

    def layer(self, shape, mlp):
        scale = D**-0.5
        norms = self.norm(P), self.norm(P)
        out = self.draw(D, shape.num_heads * P, scale=0.1)
        attention = AttentionWeights(shape, self.norm(D), self.draw(shape.width, D, scale=scale), *norms, out)
        return LayerWeights(attention, mlp, self.tables[shape])

    def dense(self):
        up, down = self.draw(2 * DENSE, D, scale=0.15), self.draw(D, DENSE, scale=0.15)
        return DenseWeights(self.norm(D), up, down)

    def sparse(self):
        return SparseWeights(
            norm=self.norm(D),
            router_gate_up=self.draw(E + 2 * FS, D, scale=0.15),
            bias=self.draw(E, scale=0.1, of=torch.float32),
            gate_up=self.draw(E, 2 * F, D, scale=0.15),
            down=self.draw(E, D, F, scale=0.2),
            shared_down=self.draw(D, FS, scale=0.2),
            top_k=A,
            scaling=2.5,
        )

    def caches(self):
        """Fresh pages of NaN."""
        size = (MAX_LEN // 4 + 1, 4, J, P)
        like = {"dtype": self.target.head.dtype, "device": self.device}
        pages = [tuple(torch.full(size, float("nan"), **like) for _ in range(2)) for _ in self.target.layers]
        return Caches(tuple(pages), tuple(self.table for _ in pages))

    def step(self, caches):
        return TargetStep(
            self.target,
            caches,
            self.inputs,
            self.scratch,
            self.sampled,
            tap_layers=(0, 1),
            taps=self.taps,
            logits=self.logits,
            launch=LAUNCH,
            tiles=TILES,
        )

    def place(self, tokens, first):
        """One request whose rows are these tokens from this position."""
        rows, n = self.inputs.rows, len(tokens)
        rows.num_rows.fill_(n)
        rows.num_requests.fill_(1)
        rows.row_count[0] = n
        rows.positions[:n] = torch.arange(first, first + n, device=self.device)
        self.inputs.input_ids[:n] = torch.tensor(tokens, device=self.device)

    def feed(self, step, tokens, widths):
        """Run tokens through in blocks of the given widths; return logits and taps of every token."""
        logits, taps, at = [], [], 0
        for n in widths:
            self.place(tokens[at : at + n], at)
            step.run()
            logits.append(self.logits[:n].clone())
            taps.append(self.taps[:n].clone())
            at += n
        return torch.cat(logits), torch.cat(taps)

    def plain(self, twins, tokens):
        """Logits and taps of the whole sequence at once, by plain PyTorch."""
        h = self.target.embed[torch.tensor(tokens, device=self.device)]
        at, taps = torch.arange(len(tokens), device=self.device), []
        for layer in self.target.layers:
            a, n = layer.attention, len(tokens)
            H = a.shape.num_heads
            qkv = twins.linear(twins.rms_norm(h, a.input_norm, EPS), a.qkv)
            q, k, v, gate = qkv.split([H * P, J * P, J * P, H], -1)
            cos, sin = (t[at] for t in layer.rotary)
            q = twins.rotate(twins.rms_norm(q.reshape(n, H, P), a.q_norm, EPS), cos, sin)
            k = twins.rotate(twins.rms_norm(k.reshape(n, J, P), a.k_norm, EPS), cos, sin)
            y = twins.attention(q, k, v.reshape(n, J, P), at, window=a.shape.window)
            y = y * torch.nn.functional.softplus(gate.float()).to(y.dtype)[..., None]
            h = h + twins.linear(y.reshape(n, -1), a.out)
            x, m = twins.rms_norm(h, layer.mlp.norm, EPS), layer.mlp
            if isinstance(m, DenseWeights):
                h = h + twins.linear(twins.silu_and_mul(twins.linear(x, m.gate_up)), m.down)
            else:
                both = twins.linear(x, m.router_gate_up)
                weights, ids = twins.route(both[:, :E], m.bias, A)
                routed = twins.moe(x, m.gate_up, m.down, weights, ids).to(h.dtype)
                h = h + (routed * 2.5 + twins.linear(twins.silu_and_mul(both[:, E:]), m.shared_down))
            taps.append(h)
        x = twins.rms_norm(h, self.target.norm, EPS)
        return twins.linear(x, self.target.head).float(), torch.stack(taps, 1)


@pytest.fixture
def model(draw, device, dtype):
    return Model(draw, device, dtype)


def test_a_step_equals_the_plain_model(plain, model, tolerance):
    tokens = torch.randint(V, (9,)).tolist()
    logits, taps = model.feed(model.step(model.caches()), tokens, [5, 1, 3])
    expected, expected_taps = model.plain(plain, tokens)
    torch.testing.assert_close(logits, expected, atol=20 * tolerance, rtol=20 * tolerance)
    torch.testing.assert_close(taps, expected_taps, atol=20 * tolerance, rtol=20 * tolerance)


# Under the interpreter the rounding points show in float16; its engine's tests compare in float32.
BY_DTYPE = (
    ["bfloat16", "float16"]
    if torch.cuda.is_available()
    else [pytest.param("float32", marks=pytest.mark.slow), "float16"]
)


@pytest.mark.parametrize("dtype", BY_DTYPE, indirect=True)
def test_verified_rows_have_the_bits_of_decoded_rows(model, assert_same_bits):
    tokens = torch.randint(V, (9,)).tolist()
    decoded, decoded_taps = model.feed(model.step(model.caches()), tokens, [1] * 9)
    verified, verified_taps = model.feed(model.step(model.caches()), tokens, [3, 6])
    assert_same_bits(verified, decoded)
    assert_same_bits(verified_taps, decoded_taps)


def test_room_for_parts_of_attention_can_come_later(model):
    layers, head = model.target.layers, model.target.head
    bare = Scratch.allocate(layers, head, TILES, has_parts=False)
    assert [part.numel() for part in bare.partial] == [0, 0]
    later, usual = bare.with_parts(layers), Scratch.allocate(layers, head, TILES)
    assert [part.shape for part in later.partial] == [part.shape for part in usual.partial]
    assert later.hidden is bare.hidden


def requests_for(device, remaining, num_drafts, ring):
    def ints(value=0):
        return torch.full((16,), value, dtype=torch.int32, device=device)

    return Requests(
        remaining=ints(remaining),
        num_drafts=ints(num_drafts),
        seeds=torch.zeros(16, dtype=torch.int64, device=device),
        temperatures=torch.zeros(16, device=device),
        stop_ids=torch.full((16, 1), -1, dtype=torch.int32, device=device),
        ring=ring,
        emitted=ints(),
        accepted=ints(),
        drafted=ints(),
    )


@pytest.mark.slow
@pytest.mark.parametrize("guide", ["drafter", "oracle"])
def test_drafts_change_the_number_of_steps_but_no_token(model, device, guide):
    prompt, length = torch.randint(V, (4,)).tolist(), 10
    step, tokens = model.step(model.caches()), list(prompt)
    model.feed(step, prompt[:-1], [3])
    for i in range(length):
        model.place(tokens[-1:], 3 + i)
        step.run()
        tokens.append(model.sampled[0].item())
    expected = tokens[4:]

    ring = torch.zeros(16, 16, dtype=torch.int32, device=device)
    requests = requests_for(device, length, 3, ring)
    step, cache = model.step(model.caches()), model.caches().layers[0]
    draft = DraftStep(
        model.drafter,
        model.target.embed,
        model.target.head,
        (cache[0][None], cache[1][None]),
        model.table,
        model.inputs,
        model.scratch,
        Features.allocate(model.drafter),
        launch=LAUNCH,
        tiles=TILES,
    )
    model.feed(step, prompt[:-1], [3])
    draft.append_context(model.taps)
    model.place(prompt[-1:], 3)
    steps = 0
    while requests.remaining[0] > 0:
        step.run()
        draft.append_context(model.taps)
        inputs = model.inputs
        accept(
            inputs.input_ids,
            model.sampled,
            inputs.rows,
            inputs.seeds,
            inputs.temperatures,
            requests,
            LAUNCH,
            mask_token=12,
        )
        out = requests.emitted[0].item()
        n = inputs.rows.num_rows.item()
        if guide == "oracle" and n:
            inputs.input_ids[:n] = torch.tensor(expected[out - 1 : out - 1 + n], device=device)
        else:
            draft.propose()
        steps += 1
    assert ring[0, :length].tolist() == expected
    assert requests.emitted[0] == length
    if guide == "oracle":
        assert steps == 4
        assert requests.accepted[0] == 6
