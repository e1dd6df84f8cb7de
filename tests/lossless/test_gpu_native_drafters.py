"""On a GPU, with the small model's own weights: drafters of every kind change no token and no logit.

    python -m pytest -m gpu tests/lossless/test_gpu_native_drafters.py

DSpark with drafts cut by confidence, in FP8, and under options that the host decides.
"""

from __future__ import annotations

import pytest

from lean_laguna.core.structured_outputs import StructuredOutputs
from lean_laguna.core.types import SamplingParams
from lean_laguna.engine.gpu_costs import RowCosts
from lean_laguna.engine.llm import LLM
from lean_laguna.spec.draft_schedule import StepCosts
from support.watched import WatchedEngine

pytestmark = [
    pytest.mark.gpu,
    # Libraries of the machine at hand warn about themselves; the suite's own warnings are caught elsewhere.
    pytest.mark.filterwarnings("default"),
]

TEXTS = ("def add(a, b):\n    return", "class Stack:\n    def __init__(self):\n", "import os\n\nfor name in")
OPTIONS = {
    "greedy": {"temperature": 0.0},
    "sampled": {},
    "top_k": {"top_k": 20, "top_p": 0.9},
    "logprobs": {"logprobs": 3},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    "top_p": {"top_p": 0.8},
    "structured": {"structured_outputs": StructuredOutputs(regex="[a-z_ ]{20,40}"), "ignore_eos": False},
}
DRAFTERS = {
    "dspark": {"model": "nano-dspark"},
    "dspark fp8": {"model": "nano-dspark", "quantization": "fp8"},
    "dflash fp8": {"model": "nano-dflash", "quantization": "fp8"},
}


@pytest.fixture(scope="module", params=DRAFTERS)
def engine(request):
    llm = LLM(
        "nano",
        speculative_config=DRAFTERS[request.param],
        kernels="triton",
        max_num_seqs=16,
        kv_cache_memory_bytes=1 << 30,
    )
    return Watched(llm.engine)


class Watched(WatchedEngine):
    """An engine whose logits are hashed, sequence by sequence."""

    def __init__(self, engine):
        super().__init__(engine)
        self.prompts = [[2, *engine.tokenizer.encode(text)] for text in TEXTS]

    def run(self, num_drafts, max_tokens=48, **options):
        params = [
            SamplingParams(
                **{"temperature": 0.8, "ignore_eos": True, "max_tokens": max_tokens, "seed": i, **options}
            )
            for i in range(len(self.prompts))
        ]
        before = self.num_accepted
        found = super().run(self.prompts, params, num_drafts)
        return found, self.num_accepted - before


@pytest.mark.parametrize("name", OPTIONS)
def test_a_drafter_changes_nothing_at_a_fixed_length_or_scheduled(engine, name):
    if name == "structured":
        pytest.importorskip("llguidance", reason="structured outputs need the extra")
    expected, _ = engine.run(0, **OPTIONS[name])
    for num_drafts in (7, None):
        found, accepted = engine.run(num_drafts, **OPTIONS[name])
        assert found == expected
        assert accepted > 0 or num_drafts is None


def test_drafts_cut_by_confidence_change_nothing(engine, monkeypatch):
    controller = engine.engine.controller
    if controller.schedule is None:
        assert engine.engine.proposer.drafter.config.dspark is None
        return

    def choose(batch, context_len, *, may_schedule):
        controller.schedule.costs = StepCosts([1.0] * 16, 0.2)
        return 7

    expected, _ = engine.run(0, 400)
    monkeypatch.setattr(controller, "choose", choose)
    widths = engine.engine.programs.widths
    seconds = [float(rows) for rows in range(widths[-1] + 1)]
    monkeypatch.setattr(engine.engine._prices, "costs", RowCosts(widths, [seconds] * len(widths)))
    found, _ = engine.run(None, 400)
    again, _ = engine.run(None, 400)
    assert found == expected == again
    assert engine.engine.stats().speculation.num_cut_draft_tokens > 0
