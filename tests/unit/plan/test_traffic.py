"""Bytes and ceilings, held against published figures and against a roofline worked out by hand beforehand."""

import pytest

from lean_laguna.models.shapes import drafter_shape, laguna_shape
from lean_laguna.plan.inventory import drafter_from_config, from_modules
from lean_laguna.plan.modules import target_modules
from lean_laguna.plan.schemes import stored_as
from lean_laguna.plan.traffic import (
    CODE_ACCEPTANCE,
    SOURCE_PARTS,
    Workload,
    acceptance,
    counted,
    distinct_experts,
    draft_bytes,
    kv_read_bytes,
    pass_bytes,
    tokens_per_step,
)

XS, DRAFTER = laguna_shape("laguna-xs"), drafter_shape("laguna-xs")
ROWS = (1, 4, 7, 8, 16)
# GB per pass at a context of 2048 for 1, 4, 7, 8, 16 rows, and for 16 that share 38 % of their experts;
# then tok/s at 4.3 TB/s: no draft, 6 drafts, and the best number of drafts with its speed.
PUBLISHED = {
    "bf16": ((5.77, 11.30, 16.32, 17.90, 28.83, 21.33), (745, 1227, 5, 1228)),
    "fp8": ((4.67, 7.43, 9.94, 10.73, 16.20, 12.45), (922, 1921, 7, 1937)),
    "fp8-all": ((2.98, 5.74, 8.26, 9.04, 14.51, 10.76), (1443, 2259, 6, 2259)),
    "nvfp4-routed": ((4.36, 5.91, 7.33, 7.77, 10.84, 8.73), (986, 2502, 10, 2626)),
    "nvfp4": ((4.18, 5.74, 7.15, 7.59, 10.67, 8.56), (1028, 2554, 10, 2671)),
    "nvfp4-fp8-attention": ((2.75, 4.31, 5.72, 6.16, 9.24, 7.13), (1562, 3072, 8, 3133)),
    "nvfp4-attention": ((2.13, 3.68, 5.09, 5.54, 8.61, 6.50), (2023, 3371, 8, 3402)),
    "nvfp4-all": ((1.87, 3.42, 4.84, 5.28, 8.35, 6.25), (2299, 3510, 7, 3533)),
}


def total(scheme, work):
    return counted(pass_bytes(XS, stored_as(XS, scheme), work))


@pytest.mark.parametrize("scheme", PUBLISHED)
def test_bytes_per_pass_are_those_of_the_roofline_table(scheme):
    found = [total(scheme, Workload(rows)) for rows in ROWS] + [total(scheme, Workload(16, overlap=0.38))]
    assert [f"{size / 1e9:.2f}" for size in found] == [f"{size:.2f}" for size in PUBLISHED[scheme][0]]


@pytest.mark.parametrize("scheme", PUBLISHED)
def test_ceilings_are_those_of_the_roofline_table(scheme):
    drafted = draft_bytes(XS, stored_as(XS, "bf16"), drafter_from_config(DRAFTER), DRAFTER)
    inventory = stored_as(XS, scheme)
    # The roofline's drafter reads a head in BF16 whatever the target's is stored as.
    speed = {0: 4.3e12 / total(scheme, Workload())}
    for drafts in range(1, 16):
        size = counted(pass_bytes(XS, inventory, Workload(drafts + 1))) + drafted
        speed[drafts] = tokens_per_step(CODE_ACCEPTANCE, drafts) / size * 4.3e12
    best = max(speed, key=speed.get)
    plain, six, best_drafts, best_speed = PUBLISHED[scheme][1]
    # Scales of whole tensors and the router's bias, which the roofline leaves out, are a few ten kB.
    assert speed[0] == pytest.approx(plain, abs=0.6)
    assert speed[6] == pytest.approx(six, abs=0.6)
    assert (best, speed[best]) == (best_drafts, pytest.approx(best_speed, abs=0.6))


def test_the_recipe_for_a_dgx_spark_is_reproduced_under_its_accounting():
    parts = pass_bytes(XS, stored_as(XS, "nvfp4"), Workload())
    narrow = counted(parts, SOURCE_PARTS)
    assert f"{parts['attention'] / narrow:.0%}" == "82%"
    assert f"{parts['experts'] / narrow:.0%}" == "16%"
    assert f"{273e9 / narrow:.0f}" == "78"
    # Counted in full, with head, dense layer, router and keys and values, the ceiling is lower.
    assert f"{273e9 / counted(parts):.0f}" == "65"
    assert f"{231e9 / counted(parts):.0f}" == "55"


def test_the_card_of_the_s_build_with_quantised_attention_is_reproduced():
    shape = laguna_shape("laguna-s-2.1")
    stock = stored_as(shape, "nvfp4-routed")  # it keeps the shared expert in BF16
    parts = pass_bytes(shape, stock, Workload(context=0))
    assert f"{counted(parts) / 1e9:.1f}" == "9.9"
    assert f"{parts['attention'] / counted(parts):.0%}" == "57%"
    # q, k, v and o alone are quantised there; the card says about 5.7 GB, and about 4 GB less on disk.
    schemes = {"experts", "attention"}
    lean = stored_as(shape, "nvfp4-attention")
    nvfp4 = from_modules(
        target_modules(shape),
        lambda m: None if m.module_class not in schemes or m.name.endswith("g_proj") else _nvfp4(),
        "BF16",
    )
    assert counted(pass_bytes(shape, nvfp4, Workload(context=0))) == pytest.approx(5.7e9, rel=0.05)
    assert stock.stored_bytes - nvfp4.stored_bytes == pytest.approx(4e9, rel=0.05)
    assert lean.stored_bytes < nvfp4.stored_bytes


def _nvfp4():
    from lean_laguna.quant.scheme import NVFP4

    return NVFP4


def test_distinct_experts_are_those_of_the_table():
    rows = (1, 2, 4, 7, 8, 12, 16)
    assert [f"{distinct_experts(256, 8, m):.1f}" for m in rows] == [
        "8.0",
        "15.8",
        "30.5",
        "51.0",
        "57.4",
        "81.1",
        "102.0",
    ]
    assert [f"{distinct_experts(256, 8, m, 0.38):.1f}" for m in rows] == [
        "8.0",
        "12.8",
        "22.2",
        "35.6",
        "39.9",
        "56.3",
        "71.4",
    ]
    assert distinct_experts(0, 0, 4) == 0


def test_keys_and_values_are_those_of_the_table():
    sizes = [kv_read_bytes(XS, context) / 1e6 for context in (2048, 32768, 131072)]
    assert [f"{size:.0f}" for size in sizes] == ["147", "1405", "5432"]
    assert kv_read_bytes(XS, 2048, 1) * 2 == kv_read_bytes(XS, 2048)
    assert kv_read_bytes(XS, 100) == 40 * 100 * 2 * 8 * 128 * 2


def test_a_drafter_reads_itself_and_the_head_that_it_borrows():
    drafted = draft_bytes(XS, stored_as(XS, "bf16"), drafter_from_config(DRAFTER), DRAFTER)
    assert f"{drafted / 1e9:.2f}" == "1.34"


def test_acceptance_goes_on_beyond_what_was_measured():
    assert acceptance((0.5,), 3) == [0.5, 0.5 * 0.86, 0.5 * 0.86 * 0.86]
    assert [f"{tokens_per_step(CODE_ACCEPTANCE, k):.2f}" for k in (0, 6, 8, 15)] == [
        "1.00",
        "5.04",
        "5.78",
        "7.14",
    ]
