import json

import pytest

from lean_laguna.core.errors import ConfigError
from lean_laguna.models.shapes import laguna_shape
from lean_laguna.plan.bandwidth import Bandwidth, bandwidth_of_card
from lean_laguna.plan.inspection import Question, inspect
from lean_laguna.plan.subject import drafter_of, target_of, target_of_shape
from lean_laguna.plan.traffic import Workload, counted, pass_bytes

SPARK = bandwidth_of_card("gb10")
XS = target_of_shape("laguna-xs-2.1", "nvfp4")


def test_both_accountings_of_the_dgx_spark_recipe_stand_side_by_side():
    token = inspect(XS, None, Question(SPARK))["token"]
    shares = {part["part"]: part for part in token["parts"]}
    assert round(shares["attention"]["narrow_share"], 2) == 0.82
    assert round(token["narrow"]["ceiling_tok_per_s"]) == 78
    assert round(shares["attention"]["share"], 3) == 0.684
    assert round(token["ceiling_tok_per_s"]) == 65
    assert sum(part["share"] for part in token["parts"]) == pytest.approx(1)
    assert sum(part.get("narrow_share", 0) for part in token["parts"]) == pytest.approx(1)


def test_weights_per_token_leave_out_idle_experts_and_the_embedding():
    assert inspect(XS, None, Question(SPARK))["model"]["num_weights_per_token"] == pytest.approx(
        2.81e9, rel=2e-3
    )


def test_rows_say_when_a_drafter_pays():
    found = inspect(XS, drafter_of("laguna-xs-2.1"), Question(SPARK, rows=(1, 4, 7, 9, 11)))
    one, *drafted = found["rows"]
    assert one["ceiling_tok_per_s"] == pytest.approx(found["token"]["ceiling_tok_per_s"])
    # Of the roofline's table for 273 GB/s: 6 drafts 162 tok/s in 31.09 ms, the best with 10, 170 tok/s.
    by_rows = {row["num_rows"]: row for row in drafted}
    assert round(by_rows[7]["ceiling_tok_per_s"]) == 162
    assert round(by_rows[7]["step_ms"], 2) == 31.09
    assert round(by_rows[11]["ceiling_tok_per_s"]) == 170
    for row in drafted:
        # At the break-even length a step yields exactly what as many plain tokens would take.
        plain_ms = row["break_even_length"] * one["pass_ms"]
        assert plain_ms == pytest.approx(row["step_ms"])


def test_context_overlap_and_kv_format_reach_the_bytes():
    question = Question(SPARK, context=131072, rows=(16,), overlap=0.38, kv_element_bytes=1)
    (row,) = inspect(XS, None, question)["rows"]
    expected = pass_bytes(XS.config, XS.inventory, Workload(16, 131072, 0.38, 1))
    assert row["bytes"] == counted(expected)


def test_the_result_is_json_and_tells_of_the_files():
    found = json.loads(json.dumps(inspect(target_of("nano"), drafter_of("nano-dflash"), Question(SPARK))))
    assert found["files"]["problems"] == []
    assert found["drafter"]["max_draft_tokens"] == 15
    assert found["drafter"]["own_read_bytes"] == found["drafter"]["stored_bytes"]


def test_a_drafter_of_another_target_is_refused():
    with pytest.raises(ConfigError, match="not made for this target"):
        inspect(XS, drafter_of("nano-dflash"), Question(SPARK))


def test_a_dense_target_has_no_experts():
    config = laguna_shape("laguna-xs").to_dict() | {"mlp_layer_types": ["dense"] * 40}
    from lean_laguna.plan.inventory import target_from_config
    from lean_laguna.plan.subject import Target

    config, inventory = target_from_config(config, "config.json")
    found = inspect(
        Target("dense", config, inventory, None, "config"), None, Question(Bandwidth(1e9, "given"))
    )
    assert found["model"]["num_weights_per_token"] == inventory.num_weights() - 100352 * 2048
    assert next(part["bytes"] for part in found["token"]["parts"] if part["part"] == "experts") == 0
