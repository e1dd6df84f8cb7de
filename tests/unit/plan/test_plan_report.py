import io
import re

import pytest
from rich.console import Console

from lean_laguna.plan.cards import card
from lean_laguna.plan.engine_memory import EngineLimits
from lean_laguna.plan.fitting import Room, Wish, plan
from lean_laguna.plan.plan_report import cap_line, plan_report
from lean_laguna.plan.subject import drafter_of, target_of_shape

XS = target_of_shape("laguna-xs-2.1", "nvfp4")


def planned(name, context, streams):
    found = card(name)
    room = Room(found.usable_bytes, found.name, found.is_unified)
    return plan(XS, drafter_of("laguna-xs-2.1"), room, Wish(context, streams, EngineLimits(), 1))


def shown(found, width=80):
    console = Console(file=io.StringIO(), width=width)
    console.print(plan_report(found), crop=False)
    return console.file.getvalue()


def test_what_fits_comes_with_the_flags_of_both_servers():
    found = planned("gb10", 262144, 2)
    text = " ".join(shown(found).split())
    assert "fits: " in text
    assert "lean-laguna serve: --max-model-len 262144 --max-num-seqs 2 --kv-cache-memory-bytes" in text
    assert "vllm serve: --max-model-len 262144 --max-num-seqs 2 --max-num-batched-tokens 8192" in text
    assert f"--kv-cache-memory-bytes {found['vllm']['kv_cache_memory_bytes']}" in text
    assert "262,144 (its limit)" in text


def test_what_does_not_fit_comes_with_what_would():
    text = shown(planned("rtx-4090", 131072, 4))
    assert "does not fit: " in text
    assert "would fit, each alone:" in text
    assert "streams" in text.partition("would fit")[2]
    assert "vLLM does not fit either" in text


@pytest.mark.parametrize("name", ["gb10", "rtx-4090"])
def test_nothing_is_cut_on_a_narrow_terminal(name):
    text = shown(planned(name, 131072, 4))
    assert "…" not in text
    commands = [line for line in text.splitlines() if " serve: " in line]
    assert max(len(line) for line in text.splitlines() if line not in commands) <= 80
    assert all(re.search(r"--kv-cache-memory-bytes \d+$", line) for line in commands)  # in one piece


def test_every_byte_of_the_plan_has_a_row():
    text = shown(planned("gb10", 32768, 1))
    for label in (
        "weights",
        "drafter",
        "full layers",
        "sliding layers",
        "KV cache, drafter, sliding",
        "workspace",
        "left",
    ):
        assert label in text


@pytest.mark.parametrize("drafter", [None, "poolside/Laguna-XS-2.1-DFlash"])
def test_the_cap_is_one_command_to_paste(drafter):
    found = planned("gb10", 262144, 2)
    line = cap_line(found, "my model", drafter)
    assert line.startswith("systemd-run --user --scope --collect -p MemoryMax=")
    assert "-p MemorySwapMax=0 lean-laguna serve 'my model' --drafter" in line
    assert f"--drafter {drafter or 'none'} --max-model-len 262144" in line
    limit = int(line.partition("MemoryMax=")[2].partition("G")[0])
    assert found["lean_laguna"]["used_bytes"] < limit * 2**30 < card("gb10").memory_bytes
