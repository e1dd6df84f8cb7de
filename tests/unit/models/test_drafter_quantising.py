import torch

from lean_laguna.models.drafter_quantising import quantise_drafter
from support.drafters import dspark_json, random_drafter


def test_linears_become_rows_of_e4m3_and_the_rest_stays():
    plain, drafter = random_drafter(dspark_json()), random_drafter(dspark_json())
    quantise_drafter(drafter)
    for name, before in plain.named_parameters():
        after = drafter.get_parameter(name)
        if name not in drafter.packed_weights:
            assert torch.equal(after, before), name
            continue
        scale = before.abs().amax(1, keepdim=True) / 448
        expected = (before / scale).to(torch.float8_e4m3fn).float() * scale
        torch.testing.assert_close(after, expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(drafter.packed_weights[name].decode(), after)
    layers = {name.split(".", 2)[2] for name in drafter.packed_weights if name.startswith("layers.")}
    assert layers == {
        "self_attn.qkv_proj.weight",
        "self_attn.g_proj.weight",
        "self_attn.o_proj.weight",
        "gate_up_proj.weight",
        "down_proj.weight",
    }
    assert "markov_w2" in drafter.packed_weights
    drafter.load_state_dict(plain.state_dict())
    assert not drafter.packed_weights
