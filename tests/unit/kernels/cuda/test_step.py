"""A whole step in one launch equals plain layers, appends keys, and keeps every row's bits its own."""

import pytest
import torch

from lean_laguna.kernels.cuda.step import StepKernel, Workspace, fits_step
from lean_laguna.kernels.triton.attention import AttentionShape
from lean_laguna.kernels.triton.rows import Rows
from lean_laguna.kernels.triton.weights import (
    AttentionWeights,
    DenseWeights,
    LayerWeights,
    SparseWeights,
    rotary_tables,
)
from support import kernel_twins as plain

D, J, P, V, EPS, MAX_LEN, PAGE = 512, 2, 128, 64, 1e-6, 640, 16
E, A, F, FS, DENSE = 32, 3, 256, 256, 512
FULL = AttentionShape(8, J, P, 64)
SLIDING = AttentionShape(8, J, P, P, window=70)


class Model:
    """A dense full layer and a sparse sliding one, and what a step reads."""

    def __init__(self, draw, poisoned, device):
        self.draw, self.poisoned, self.device = draw, poisoned, device
        inverse = 10000.0 ** -(torch.arange(P // 2, device=device) * 2 / P)
        self.tables = {
            FULL: rotary_tables(inverse[:32], MAX_LEN, 1.2, torch.bfloat16),
            SLIDING: rotary_tables(inverse, MAX_LEN, 1.0, torch.bfloat16),
        }
        self.layers = (self.layer(FULL, self.dense()), self.layer(SLIDING, self.sparse()))
        self.embed, self.norm = draw(V, D), draw(D, scale=0.1) + 1
        blocks = MAX_LEN // PAGE
        self.table = torch.zeros(16, blocks, dtype=torch.int32, device=device)
        self.table[:3] = (torch.randperm(3 * blocks, device=device).to(torch.int32) + 1).view(3, blocks)
        self.workspace = Workspace.allocate(self.layers, device)
        self.workspace.parts.fill_(-1)
        self.input_ids = torch.zeros(16, dtype=torch.int32, device=device)

        def ints(n=16):
            return torch.zeros(n, dtype=torch.int32, device=device)

        self.rows = Rows(ints(1), ints(1), ints(), ints(), ints(), ints())

    def layer(self, shape, mlp):
        norms = self.draw(P, scale=0.1) + 1, self.draw(P, scale=0.1) + 1
        qkv, out = self.draw(shape.width, D, scale=D**-0.5), self.draw(D, shape.num_heads * P, scale=0.03)
        attention = AttentionWeights(shape, self.draw(D, scale=0.1) + 1, qkv, *norms, out)
        return LayerWeights(attention, mlp, self.tables[shape])

    def dense(self):
        up, down = self.draw(2 * DENSE, D, scale=D**-0.5), self.draw(D, DENSE, scale=DENSE**-0.5)
        return DenseWeights(self.draw(D, scale=0.1) + 1, up, down)

    def sparse(self):
        return SparseWeights(
            norm=self.draw(D, scale=0.1) + 1,
            router_gate_up=self.draw(E + 2 * FS, D, scale=D**-0.5),
            bias=self.draw(E, scale=0.3, of=torch.float32),
            gate_up=self.draw(E, 2 * F, D, scale=D**-0.5),
            down=self.draw(E, D, F, scale=F**-0.5),
            shared_down=self.draw(D, FS, scale=FS**-0.5),
            top_k=A,
            scaling=1.5,
        )

    def caches(self):
        """Fresh pages of NaN."""
        size = (3 * MAX_LEN // PAGE + 1, PAGE, J, P)
        return [(self.poisoned(*size), self.poisoned(*size)) for _ in self.layers]

    def kernel(self, caches, cols=8):
        """A step, with taps of all layers."""
        self.normed = self.poisoned(16, D)
        self.taps = self.poisoned(16, len(self.layers), D)
        return StepKernel(
            self.layers,
            self.embed,
            self.norm,
            caches,
            [self.table] * len(self.layers),
            self.input_ids,
            self.rows,
            self.normed,
            self.workspace,
            eps=EPS,
            cols=cols,
            taps=[self.taps[:, i] for i in range(len(self.layers))],
            # Few keys a task and a short ring, so that small tests cross both.
            options={"PATIENCE": 100_000, "CHUNK": 64, "RING": 6},
        )

    def place(self, tokens, firsts):
        """Requests whose rows are these tokens from these positions."""
        rows, counts = self.rows, [len(t) for t in tokens]
        total = sum(counts)
        rows.num_rows.fill_(total)
        rows.num_requests.fill_(len(tokens))
        for r, (n, first) in enumerate(zip(counts, firsts, strict=True)):
            start = sum(counts[:r])
            rows.row_start[r], rows.row_count[r] = start, n
            rows.positions[start : start + n] = torch.arange(first, first + n)
            self.input_ids[start : start + n] = torch.tensor(tokens[r])

    def run(self, kernel, tokens, firsts):
        """Run one step; return the rows' normed output and taps."""
        self.place(tokens, firsts)
        self.normed.fill_(float("nan"))
        self.taps.fill_(float("nan"))
        kernel.run()
        assert self.workspace.complaint() is None
        total = sum(len(t) for t in tokens)
        assert self.normed[total:].isnan().all()
        assert self.taps[total:].isnan().all()
        return self.normed[:total].clone(), self.taps[:total].clone()

    def expected(self, tokens):
        """Normed output and taps of a whole sequence at once, by plain PyTorch."""
        h, n = self.embed[torch.tensor(tokens, device=self.device)], len(tokens)
        at, taps = torch.arange(n, device=self.device), []
        for layer in self.layers:
            a, m = layer.attention, layer.mlp
            H = a.shape.num_heads
            qkv = plain.linear(plain.rms_norm(h, a.input_norm, EPS), a.qkv)
            q, k, v, gate = qkv.split([H * P, J * P, J * P, H], -1)
            cos, sin = (t[at] for t in layer.rotary)
            q = plain.rotate(plain.rms_norm(q.reshape(n, H, P), a.q_norm, EPS), cos, sin)
            k = plain.rotate(plain.rms_norm(k.reshape(n, J, P), a.k_norm, EPS), cos, sin)
            y = plain.attention(q, k, v.reshape(n, J, P), at, window=a.shape.window)
            y = y * torch.nn.functional.softplus(gate.float()).to(y.dtype)[..., None]
            h = h + plain.linear(y.reshape(n, -1), a.out)
            x = plain.rms_norm(h, m.norm, EPS)
            if isinstance(m, DenseWeights):
                h = h + plain.linear(plain.silu_and_mul(plain.linear(x, m.gate_up)), m.down)
            else:
                both = plain.linear(x, m.router_gate_up)
                weights, ids = plain.route(both[:, :E], m.bias, A)
                routed = plain.moe(x, m.gate_up, m.down, weights, ids).to(h.dtype)
                h = h + (routed * 1.5 + plain.linear(plain.silu_and_mul(both[:, E:]), m.shared_down))
            taps.append(h)
        return plain.rms_norm(h, self.norm, EPS), torch.stack(taps, 1)


@pytest.fixture
def model(draw, poisoned, device):
    return Model(draw, poisoned, device)


def test_a_step_equals_the_plain_layers(model):
    assert fits_step(model.layers)
    tokens = torch.randint(V, (9,)).tolist()
    kernel = model.kernel(model.caches())
    parts = [model.run(kernel, [tokens[a:b]], [a]) for a, b in ((0, 5), (5, 6), (6, 9))]
    normed, taps = (torch.cat([p[i] for p in parts]) for i in (0, 1))
    expected, expected_taps = model.expected(tokens)
    assert (normed.float() - expected.float()).norm() < 0.02 * expected.float().norm()
    assert (taps.float() - expected_taps.float()).norm() < 0.02 * expected_taps.float().norm()


def filled(model):
    """Pages of random keys and values, as after a long context."""
    caches = model.caches()
    for pages in caches:
        for page in pages:
            page.copy_(model.draw(*page.shape))
    return caches


def test_a_row_keeps_its_bits_among_others(model):
    caches = filled(model)
    kernel = model.kernel(caches)
    # Full layers cross a split of 256 keys, sliding ones two windows.
    tokens, first = torch.randint(V, (4,)).tolist(), 254
    alone = [model.run(kernel, [[t]], [first + i]) for i, t in enumerate(tokens)]
    together = model.run(kernel, [tokens], [first])
    wider = model.kernel(caches, 16)
    model.table[:3] = model.table[:3].roll(1, 0)
    # Keys of the first neighbour are not numbers: its own rows suffer, and nobody waits in vain.
    for keys, _ in caches:
        keys[model.table[0].long()] = float("nan")
    beside = model.run(wider, [[1, 2, 3, 4], tokens, [5] * 3], [7, first, 511])
    for i in range(2):
        expected = torch.cat([a[i] for a in alone]).view(torch.int16)
        assert torch.equal(together[i].view(torch.int16), expected)
        assert torch.equal(beside[i][4:8].view(torch.int16), expected)


def test_tags_start_anew_before_they_run_out(model):
    kernel = model.kernel(model.caches())
    tokens = [[3, 1, 4]]
    expected = model.run(kernel, tokens, [0])
    model.workspace.state[0] = 65530
    for used in (65532, 65534, 2, 4):
        for mine, theirs in zip(model.run(kernel, tokens, [0]), expected, strict=True):
            assert torch.equal(mine, theirs)
        assert model.workspace.state[0].item() == used


def test_equal_scores_go_to_the_lower_expert(model):
    mlp = model.layers[1].mlp
    mlp.router_gate_up[:E] = 0
    mlp.bias.zero_()
    tokens = [3, 14]
    normed, _ = model.run(model.kernel(model.caches()), [tokens], [0])
    expected, _ = model.expected(tokens)
    assert (normed.float() - expected.float()).norm() < 0.02 * expected.float().norm()


def test_a_step_of_no_rows_writes_nothing(model):
    kernel = model.kernel(model.caches())
    model.rows.num_rows.zero_()
    kernel.run()
    assert model.normed.isnan().all()
    assert model.workspace.state[0].item() == 0
