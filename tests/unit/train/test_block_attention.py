import pytest
import torch

from lean_laguna.train.block_attention import BlockAttention, block_mask, context_mask


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("causal", [True, False])
def test_masks_equal_the_rule_by_brute_force(window, causal):
    anchors, slots, length = torch.tensor([[0, 3, 9]]), 4, 12
    far, near = (
        context_mask(anchors, slots, length, window)[0],
        block_mask(slots, window, causal, torch.device("cpu")),
    )
    for j, a in enumerate(anchors[0].tolist()):
        for k in range(slots):
            for i in range(length):
                assert far[j * slots + k, i] == (i < a and (window is None or a + k - i < window))
            for t in range(slots):
                allowed = t <= k or not causal
                assert near[k, t] == (allowed and (window is None or abs(t - k) < window))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # plain on a CPU
@pytest.mark.parametrize("kind", ["dense", "sdpa", "flex"])
@pytest.mark.parametrize("window", [None, 5, 3])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_equals_a_loop_over_rows(kind, window, causal):
    generator = torch.Generator().manual_seed(0)
    batch, length, per, slots, heads, kv, size = 2, 9, 3, 4, 4, 2, 8
    anchors = torch.tensor([[1, 4, 8], [0, 2, 7]])
    documents = torch.tensor([[0] * 9, [0] * 5 + [1] * 4])
    q = torch.randn(batch * per, slots, heads, size, generator=generator)
    ck, cv = (torch.randn(batch * length, kv, size, generator=generator) for _ in range(2))
    bk, bv = (torch.randn(batch * per, slots, kv, size, generator=generator) for _ in range(2))
    attend = BlockAttention(anchors, length, (window,), (causal,), documents, kind)
    out = attend(0, q, ck, cv, bk, bv)
    for n in range(batch * per):
        b, a = n // per, int(anchors[n // per, n % per])
        for k in range(slots):
            seen = [
                i for i in range(a)
                if (window is None or a + k - i < window) and documents[b, i] == documents[b, a]
            ]  # fmt: skip
            own = [t for t in range(slots) if (t <= k or not causal) and abs(t - k) < (window or 99)]
            for h in range(heads):
                j = h // (heads // kv)
                keys = torch.stack([ck[b * length + i, j] for i in seen] + [bk[n, t, j] for t in own])
                values = torch.stack([cv[b * length + i, j] for i in seen] + [bv[n, t, j] for t in own])
                expected = torch.softmax(keys @ q[n, k, h] * size**-0.5, 0) @ values
                torch.testing.assert_close(
                    out[n, k, h], expected, rtol=1e-5, atol=1e-5
                )  # float32 sums, other order
