"""Runs on random weights or given acceptance rates work from the command line, and say what they are."""

from __future__ import annotations

import json

from lean_laguna.cli.main import main

DUMMY = ["--load-format", "dummy", "--shape", "nano", "--threads", "1", "--device", "cpu"]
RATES = {
    "model": "nano-dflash",
    "num_speculative_tokens": 3,
    "rejection_sample_method": "synthetic",
    "synthetic_acceptance_rates": [1.0, 1.0, 0.0],
}


def test_an_ab_on_random_weights_is_marked_and_its_differences_are_no_failure(capsys):
    words = ["bench", *DUMMY, "--num-prompts", "1", "--max-tokens", "7", "--repeats", "1", "--warmup", "0"]
    assert main([*words, "--max-model-len", "512", "--speculative-config", json.dumps(RATES), "--json"]) == 0
    said = capsys.readouterr()
    content = json.loads(said.out.splitlines()[-1])
    assert content["synthetic"] is True
    assert content["engines"]["speculative"]["model"]["name"] == "nano, random weights"
    assert content["sides"]["speculative"]["spec_decode_per_position_acceptance_rates"][:2] == [1.0, 1.0]
    assert "SYNTHETIC: random weights in the shape of nano and drafts accepted at given rates" in said.err
    assert "SYNTHETIC: for timing only" in said.err


def test_a_profile_says_where_the_time_goes(capsys):
    assert main(["bench", "--profile", *DUMMY, "--max-model-len", "160", "--json"]) == 0
    content = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert content["kind"] == "profile"
    assert content["synthetic"] is True
    assert {"matrix products", "attention"} <= {part["name"] for part in content["parts"]}
