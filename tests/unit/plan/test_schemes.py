import pytest

from lean_laguna.core.errors import ConfigError
from lean_laguna.models.shapes import laguna_shape
from lean_laguna.plan.schemes import TITLES, stored_as
from lean_laguna.quant.builds import BUILDS

XS = laguna_shape("laguna-xs")


@pytest.mark.parametrize(("name", "gib"), [("bf16", 62.3), ("nvfp4", 20.1), ("fp8", 32.9)])
def test_published_builds_have_their_published_size(name, gib):
    # 66.9 GB, '~21 GB of weights' and half of the first, as the repositories state.
    assert stored_as(XS, name).stored_bytes / 2**30 == pytest.approx(gib, abs=0.2)


def test_the_s_build_in_nvfp4_is_the_published_72_gb():
    assert stored_as(laguna_shape("laguna-s-2.1"), "nvfp4-routed").stored_bytes == pytest.approx(
        72e9, rel=0.01
    )


@pytest.mark.parametrize("name", BUILDS)
def test_every_scheme_stores_every_weight_and_leaves_norms_and_router_alone(name):
    found = stored_as(XS, name)
    assert found.num_weights() == stored_as(XS, "bf16").num_weights()
    for kind in ("norms", "router", "embedding"):
        assert found.formats(kind) == ("BF16",)
    assert found.has_fp8_kv == (name != "bf16")
    assert TITLES[name]


def test_an_unknown_scheme_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'nvfp4-attention'"):
        stored_as(XS, "nvfp4-attn")
