import torch

from lean_laguna.kernels import dispatch, reference

# Plain and tiled float32 programs add in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def test_with_gradients_the_plain_twin_agrees_with_the_reference(generator):
    x = torch.randn(9, 24, generator=generator)
    weight, norm = torch.randn(10, 24, generator=generator), torch.rand(24, generator=generator)
    heads = torch.randn(9, 3, 8, generator=generator)
    angle = torch.rand(9, 3, generator=generator)
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    logits, bias = torch.randn(9, 6, generator=generator), torch.rand(6, generator=generator)
    calls = [
        ("linear", (x, weight)),
        ("rms_norm", (x, norm, 1e-6)),
        ("silu_and_mul", (x,)),
        ("apply_rotary", (heads, cos, sin)),
    ]
    for name, arguments in calls:
        leaf = arguments[0].clone().requires_grad_()
        plain = getattr(dispatch, name)(leaf, *arguments[1:])
        plain.sum().backward()
        assert torch.isfinite(leaf.grad).all(), name
        with torch.no_grad():
            served = getattr(dispatch, name)(*arguments)
        torch.testing.assert_close(plain, served, **CLOSE)
        assert torch.equal(served, getattr(reference, name)(*arguments)), name
    plain_weights, plain_ids = dispatch.route(logits.clone().requires_grad_(), bias, 2, 0.7)
    with torch.no_grad():
        weights, ids = dispatch.route(logits, bias, 2, 0.7)
    assert torch.equal(plain_ids, ids)
    torch.testing.assert_close(plain_weights, weights, **CLOSE)


def test_everything_the_models_call_has_a_reference():
    for name in set(dispatch.__all__):
        assert hasattr(reference, name), name
