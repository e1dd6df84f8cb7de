"""The shipped DSpark drafter: the same text as without it, whatever the engine sends for verification."""

import pytest

from lean_laguna import LLM, SamplingParams
from lean_laguna.models.catalog import resolve_model
from lean_laguna.models.checkpoint import load_laguna
from lean_laguna.models.drafter_checkpoint import load_drafter

PROMPTS = [
    "class TemperatureLog:\n    def __init__(self, path):\n        self.path = path",
    "import json\n\n\ndef read_settings(path):",
]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_text_is_that_of_plain_decoding_fixed_or_scheduled(temperature):
    params = SamplingParams(temperature=temperature, max_tokens=40, ignore_eos=True, seed=3)
    plain = [output.outputs[0] for output in LLM("nano").generate(PROMPTS, params)]
    for length in (7, "auto"):
        config = {"model": "nano-dspark", "num_speculative_tokens": length}
        found = [
            output.outputs[0] for output in LLM("nano", speculative_config=config).generate(PROMPTS, params)
        ]
        assert [c.token_ids for c in found] == [c.token_ids for c in plain]
        if length == 7:  # otherwise how many drafts pay is a matter of the machine
            assert sum(c.speculation.num_accepted_tokens for c in found) > 0
            assert all(c.speculation.num_cut_draft_tokens == 0 for c in found)


def test_it_is_calibrated_for_both_kinds_of_requests():
    target = load_laguna(resolve_model("nano"))
    heads = load_drafter(resolve_model("nano-dspark"), target.config).config.dspark
    for values in (
        heads.greedy_temperatures,
        heads.sampled_temperatures,
        heads.greedy_biases,
        heads.sampled_biases,
    ):
        assert len(values) >= 7
