"""Verdicts: what fits fits, and each remedy for what does not is applied and fits."""

import dataclasses
import json

import pytest

from lean_laguna.core.errors import ConfigError
from lean_laguna.plan.cards import CARDS, card
from lean_laguna.plan.engine_memory import EngineLimits
from lean_laguna.plan.fitting import Room, Wish, cap_bytes, plan
from lean_laguna.plan.subject import drafter_of, target_of_shape

GIB = 2**30
DRAFTER = drafter_of("laguna-xs-2.1")
XS = target_of_shape("laguna-xs-2.1", "nvfp4")


def room(name):
    found = card(name)
    return Room(found.usable_bytes, found.name, found.is_unified)


def wish(context=32768, streams=1, **limits):
    return Wish(context, streams, EngineLimits(**limits))


def test_the_parts_add_up():
    found = plan(XS, DRAFTER, room("h200"), wish(131072, 4))
    for name in ("lean_laguna", "vllm"):
        part = found[name]
        used = part["weights_bytes"] + part["drafter_bytes"] + part["kv_cache_memory_bytes"]
        assert part["used_bytes"] == used + part["workspace_bytes"]
        assert part["left_bytes"] == found["room"]["total_bytes"] - part["used_bytes"]
        assert part["fits"]
    ours = found["lean_laguna"]
    assert sum(ours["kv_bytes_by_layers"].values()) == ours["kv_cache_memory_bytes"]
    assert sum(ours["workspace"].values()) == ours["workspace_bytes"]
    assert "would_fit" not in found
    assert json.loads(json.dumps(found)) == found


def test_packed_weights_scales_are_held_twice_on_a_gpu():
    found = plan(XS, None, room("h200"), wish())["lean_laguna"]["workspace"]
    packed = sum(g.num_weights for g in XS.inventory.groups if g.number_format == "NVFP4")
    assert found["scales, as the kernels take them"] == packed // 8
    on_cpu = plan(XS, None, room("h200"), wish(is_on_gpu=False))["lean_laguna"]["workspace"]
    plain = plan(target_of_shape("laguna-xs-2.1", "bf16"), None, room("h200"), wish())["lean_laguna"][
        "workspace"
    ]
    assert not any("scales" in name for name in (*on_cpu, *plain))


def test_the_recipe_fits_its_dgx_spark():
    # It serves 262,144 positions there, from 12 GiB of FP8 keys and values that hold 1.5 times that.
    recipe = dataclasses.replace(wish(262144, 1), vllm_kv_bytes=1)
    found = plan(XS, DRAFTER, room("gb10"), recipe)
    assert found["lean_laguna"]["fits"]
    assert found["vllm"]["fits"]
    assert found["vllm"]["kv_cache_memory_bytes"] == pytest.approx(12 * GIB / 1.5, rel=0.001)
    assert found["vllm"]["used_bytes"] < 44 * GIB


@pytest.mark.parametrize(("name", "context", "streams"), [("rtx-5090", 65536, 2), ("gb10", 200000, 3)])
def test_the_limits_named_are_exact(name, context, streams):
    found = plan(XS, DRAFTER, room(name), wish(context, streams))["lean_laguna"]
    longest, most = found["longest_context"], found["most_streams"]

    def fits(length, number):
        return plan(XS, DRAFTER, room(name), wish(length, number))["lean_laguna"]["fits"]

    assert fits(longest, streams)
    assert longest == 262144 or not fits(longest + 1, streams)
    assert fits(context, most)
    assert not fits(context, most + 1)


@pytest.mark.parametrize(
    ("scheme", "name", "context", "streams"),
    [
        ("nvfp4", "rtx-4090", 131072, 4),
        ("bf16", "h100", 262144, 8),
        ("bf16", "rtx-pro-6000", 262144, 8),
        ("nvfp4", "rtx-4090", 65536, 1),
    ],
)
def test_each_remedy_makes_it_fit(scheme, name, context, streams):
    target = target_of_shape("laguna-xs-2.1", scheme)
    found = plan(target, DRAFTER, room(name), wish(context, streams))
    assert not found["lean_laguna"]["fits"]
    assert found["would_fit"]
    for remedy in found["would_fit"]:
        model = target_of_shape("laguna-xs-2.1", remedy["scheme"]) if "scheme" in remedy else target
        drafter = None if "drafter" in remedy else DRAFTER
        where = next((key for key, c in CARDS.items() if c.name == remedy.get("card")), name)
        changed = wish(
            remedy.get("context", context),
            remedy.get("num_streams", streams),
            enable_prefix_caching=remedy.get("enable_prefix_caching", True),
        )
        assert plan(model, drafter, room(where), changed)["lean_laguna"]["fits"], remedy


def test_what_nothing_helps_has_no_remedy():
    target = target_of_shape("laguna-s-2.1", "nvfp4-all")
    found = plan(target, None, Room(GIB, "as given"), wish(1048576, 999))
    assert found["would_fit"] == []


def test_a_context_beyond_the_model_is_refused():
    with pytest.raises(
        ConfigError, match="at most the model's max_position_embeddings, 262144, found 262145"
    ):
        plan(XS, None, room("h200"), wish(262145))


def test_a_cap_holds_the_plan_and_leaves_the_system_its_share():
    found = plan(XS, DRAFTER, room("gb10"), wish(262144, 2))
    limit = cap_bytes(found)
    assert found["lean_laguna"]["used_bytes"] < limit < card("gb10").memory_bytes - 4 * GIB + 1
    # A card with memory of its own: the cap is for the system's.
    assert cap_bytes(plan(XS, DRAFTER, room("h200"), wish())) == 16 * GIB
