"""On a GPU, keys and values in FP8: drafts, neighbours and cached prompts change no token and no logit bit.

python -m pytest -m gpu tests/lossless/test_fp8_cache_native.py
"""

from __future__ import annotations

import pytest
import torch

from lean_laguna.core.types import SamplingParams
from lean_laguna.engine.llm import LLM
from support.watched import WatchedEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),
]

TEXTS = ("def add(a, b):\n    return", "class Stack:\n    def __init__(self):\n", "import os\n\nfor name in")


class Watching(WatchedEngine):
    """An engine whose logits are hashed, sequence by sequence."""

    def __init__(self, **options):
        self.llm = LLM(
            "nano",
            speculative_config={"model": "nano-dflash", "num_speculative_tokens": 7},
            kernels="triton",
            max_num_seqs=8,
            kv_cache_memory_bytes=1 << 28,
            prefill_chunk_size=256,
            **options,
        )
        super().__init__(self.llm.engine)
        self.prompts = [[2, *self.llm.tokenizer.encode(text)] for text in TEXTS]
        self.prompts.append([2, *(100 + 7 * i % 3000 for i in range(700))])

    def run(self, prompts, num_drafts, temperature):
        """Run requests at once; per request its tokens and the hash of its logits."""
        params = SamplingParams(temperature=temperature, ignore_eos=True, seed=3, max_tokens=60)
        states = [
            self.engine.add_request(prompt, params, num_speculative_tokens=num_drafts) for prompt in prompts
        ]
        while any(not state.is_finished for state in states):
            self.engine.step()
        return [
            (list(state.snapshot().outputs[0].token_ids), self._digests.pop(state.sequences[0]).hexdigest())
            for state in states
        ]


@pytest.fixture(scope="module")
def watching():
    return Watching(kv_cache_dtype="fp8")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_neighbours_and_cached_prompts_change_nothing(watching, temperature):
    together = watching.run(watching.prompts, 7, temperature)
    alone = [watching.run([prompt], 0, temperature)[0] for prompt in watching.prompts]
    assert together == alone
    assert watching.engine.stats().num_cached_prompt_tokens > 0


def test_the_cache_holds_codes_and_takes_half(watching):
    pools = watching.engine.programs.pools
    assert [pages.dtype for pages in pools.group(0)] == [torch.float8_e4m3fn] * 2
    whole = [group.block_bytes(16, torch.bfloat16) for group in pools.groups]
    plain = [group.num_layers * 16 * 2 * group.num_kv_heads * group.head_dim * 2 for group in pools.groups]
    assert [2 * size for size in whole[:2]] == plain[:2]


def test_it_says_nearly_what_a_whole_cache_says(watching):
    other = Watching()
    coded, whole = (side.run(side.prompts, 0, 0.0) for side in (watching, other))
    pairs = [(a, b) for (x, _), (y, _) in zip(coded, whole, strict=True) for a, b in zip(x, y, strict=True)]
    same = sum(a == b for a, b in pairs)
    print(f"FP8 cache: {same} of {len(pairs)} greedy tokens as with BF16's")
    # Once a near-tie falls the other way, texts part.
    assert same > len(pairs) // 8
    assert [x[0] for x, _ in coded] == [y[0] for y, _ in whole]
    assert [h for _, h in coded] != [h for _, h in whole]
