"""On a GPU, with the small model's own weights: the host's choices, neighbours, cached prefixes, ends.

    python -m pytest -m gpu tests/lossless/test_gpu_native.py

Drafts change no token, no bit of a log-probability and no bit of the logits.
"""

from __future__ import annotations

import pytest

from lean_laguna.core.types import SamplingParams
from lean_laguna.engine.llm import LLM
from support.watched import WatchedEngine

pytestmark = [
    pytest.mark.gpu,
    # Libraries of the machine at hand warn about themselves; the suite's own warnings are caught elsewhere.
    pytest.mark.filterwarnings("default"),
]

TEXTS = (
    "def add(a, b):\n    return",
    "class Stack:\n    def __init__(self):\n",
    "import os\n\nfor name in",
    "# the sum of a list\n",
)
ON_HOST = {
    "logprobs": {"logprobs": 3},
    "penalties": {"presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
    "logit_bias": {"logit_bias": {40: 4.0, 41: -3.0}},
    "bad_words": {"bad_words": ("return",)},
    "min_tokens": {"min_tokens": 12},
    "top_p": {"temperature": 0.9, "top_p": 0.8},
    "min_p": {"temperature": 0.9, "min_p": 0.05, "logprobs": 1},
    "greedy": {"temperature": 0.0, "logprobs": 5},
}
ON_DEVICE = {"sampled": {}, "top_k": {"top_k": 20, "top_p": 0.9}, "cold": {"temperature": 0.0}}


class Watching(WatchedEngine):
    """An engine on the small model, and prompts."""

    def __init__(self, kernels):
        llm = LLM(
            "nano",
            speculative_config={"model": "nano-dflash", "num_speculative_tokens": 7},
            kernels=kernels,
            max_num_seqs=16,
            kv_cache_memory_bytes=1 << 30,
            prefill_chunk_size=256,
            enable_prefix_caching=True,
        )
        super().__init__(llm.engine)
        self.prompts = [[2, *llm.tokenizer.encode(text)] for text in TEXTS]


@pytest.fixture(scope="module", params=["triton", "cuda"])
def watching(request):
    return Watching(request.param)


def params_of(options, seed=3, max_tokens=40):
    return SamplingParams(
        **{"temperature": 0.8, "ignore_eos": True, "seed": seed, "max_tokens": max_tokens, **options}
    )


@pytest.mark.parametrize("name", ON_HOST)
def test_drafts_change_nothing_where_the_host_decides(watching, name):
    prompts = watching.prompts
    params = [params_of(ON_HOST[name], seed) for seed in range(len(prompts))]
    plain, drafted = (watching.run(prompts, params, k) for k in (0, 7))
    assert [len(tokens) for tokens, *_ in plain] == [40] * len(prompts)
    assert plain == drafted


def test_requests_of_host_and_device_side_by_side_say_what_they_say_alone(watching):
    options = [*ON_HOST.values(), *ON_DEVICE.values()]
    prompts = [watching.prompts[i % len(TEXTS)] for i in range(len(options))]
    params = [params_of(one, seed) for seed, one in enumerate(options)]
    together = watching.run(prompts, params, 7)
    alone = [watching.run([prompt], [one], 0)[0] for prompt, one in zip(prompts, params, strict=True)]
    assert together == alone


def test_a_cached_prefix_changes_nothing(watching):
    prompt = [2, *(100 + 7 * i % 3000 for i in range(700))]
    first = watching.run([prompt], [params_of({})], 0)
    cached = watching.run([prompt], [params_of({})], 7)
    assert watching.engine.stats().num_cached_prompt_tokens > 0
    assert first == cached


def test_a_prompt_and_its_decoding_agree_on_log_probabilities(watching):
    prompt = watching.prompts[0]
    ((tokens, logprobs, _),) = watching.run([prompt], [params_of({"temperature": 1.0, "logprobs": 0})], 0)
    state = watching.engine.add_request(
        [*prompt, *tokens], params_of({"prompt_logprobs": 0, "max_tokens": 2})
    )
    while not state.is_finished:
        watching.engine.step()
    found = state.snapshot().prompt_logprobs
    assert len(found) == len(prompt) + len(tokens)
    # Two sets of kernels in BF16: near, not equal.
    for token, decoded, prefilled in zip(tokens, logprobs, found[len(prompt) :], strict=True):
        assert prefilled[token].logprob == pytest.approx(decoded[token].logprob, abs=0.25)


def test_stop_texts_ids_and_limits_end_requests_at_the_same_token(watching):
    ended = [
        {"stop": ("\n",)},
        {"stop_token_ids": (40, 50, 60)},
        {"max_tokens": 5},
        {"ignore_eos": False},
    ]
    params = [params_of(one, seed) for seed, one in enumerate(ended)]
    plain, drafted = (watching.run(watching.prompts, params, k) for k in (0, 7))
    assert [tokens for tokens, *_ in plain] == [tokens for tokens, *_ in drafted]


def test_nothing_is_held_at_the_end(watching):
    assert not watching.engine.has_unfinished
    assert watching.engine.scheduler.running == []
