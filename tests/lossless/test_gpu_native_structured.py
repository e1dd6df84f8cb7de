"""On a GPU, with the small model's own weights: structured outputs and forced calls, with drafts and without.

    python -m pytest -m gpu tests/lossless/test_gpu_native_structured.py

Drafts change no token, no bit of a log-probability and no bit of the logits; what comes out follows its
schema. A request side by side with others says what it says alone.
"""

from __future__ import annotations

import json
import re

import pytest

from lean_laguna.core.structured_outputs import StructuredOutputs
from lean_laguna.core.types import SamplingParams
from lean_laguna.engine.llm import LLM
from lean_laguna.server.tool_grammar import forced_calls
from support.watched import WatchedEngine

pytestmark = [
    pytest.mark.gpu,
    # Libraries of the machine at hand warn about themselves; the suite's own warnings are caught elsewhere.
    pytest.mark.filterwarnings("default"),
]

TEXTS = ("def add(a, b):\n    return", "class Stack:\n    def __init__(self):\n", "import os\n\nfor name in")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", 3]}, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string", "maxLength": 20},
                    "line": {"type": "integer", "minimum": 1, "maximum": 99},
                },
                "required": ["path", "line"],
            },
        },
    }
    for name in ("open_file", "delete_line")
]


def is_person(text):
    found = json.loads(text)
    return len(found["name"]) <= 12 and 0 <= found["age"] <= 120 and set(found) <= set(PERSON["properties"])


KINDS = {
    "schema": (lambda _: StructuredOutputs(json=PERSON), is_person),
    "regex": (lambda _: StructuredOutputs(regex="[a-z_ ]{20,40}"), re.compile("[a-z_ ]{20,40}").fullmatch),
    "choice": (
        lambda _: StructuredOutputs(choice=["yes", "no", "no, never"]),
        {"yes", "no", "no, never"}.__contains__,
    ),
    "any tool": (
        lambda tokenizer: forced_calls(TOOLS, "required", tokenizer),
        lambda text: "open_file" in text or "delete_line" in text,
    ),
    "one tool": (
        lambda tokenizer: forced_calls(
            TOOLS, {"type": "function", "function": {"name": "open_file"}}, tokenizer
        ),
        lambda text: "open_file" in text and "delete_line" not in text,
    ),
}


@pytest.fixture(scope="module", params=["nano-dflash", "nano-dspark"])
def watched(request):
    llm = LLM(
        "nano",
        speculative_config={"model": request.param, "num_speculative_tokens": 7},
        kernels="auto",
        max_num_seqs=16,
        kv_cache_memory_bytes=1 << 30,
    )
    return WatchedEngine(llm.engine)


def requests(watched, name, temperature):
    make, _ = KINDS[name]
    tokenizer = watched.engine.tokenizer
    prompts = [[2, *tokenizer.encode(text)] for text in TEXTS]
    params = [
        SamplingParams(
            temperature=temperature,
            max_tokens=200,
            seed=seed,
            logprobs=2,
            structured_outputs=make(tokenizer),
            skip_special_tokens=False,
        )
        for seed in range(len(prompts))
    ]
    return prompts, params


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", KINDS)
def test_drafts_change_nothing_and_the_grammar_holds(watched, name, temperature):
    prompts, params = requests(watched, name, temperature)
    plain, before = watched.run(prompts, params, 0), watched.num_accepted
    drafted = watched.run(prompts, params, 7)
    assert plain == drafted
    assert watched.num_accepted > before or name == "choice"
    tokenizer, _ends = watched.engine.tokenizer, watched.engine.tokenizer.eos_token_ids
    for tokens, *_ in drafted:
        if tokens[-1] in _ends:
            assert KINDS[name][1](tokenizer.decode(tokens[:-1])), tokenizer.decode(tokens)


def test_side_by_side_they_say_what_they_say_alone(watched):
    every = [requests(watched, name, 0.8) for name in KINDS]
    prompts = [prompt for own, _ in every for prompt in own]
    params = [one for _, own in every for one in own]
    free = SamplingParams(temperature=0.8, max_tokens=60, ignore_eos=True, seed=9)
    together = watched.run([*prompts, prompts[0]], [*params, free], 7)
    alone = [
        watched.run([p], [one], 0)[0] for p, one in zip([*prompts, prompts[0]], [*params, free], strict=True)
    ]
    assert together == alone
