"""The trainer's ``tau_chain`` is the engine's mean acceptance length, to the last count.

Both walk alike, edges included. The prefill emits the first token, so the first anchor is the first generated
token and no draft was made for it. A step drafts no more than what fits into ``max_tokens`` together with the
bonus token: with n tokens to go, n - 1. With one token to go there is nothing to draft: the engine takes a
plain step, which vLLM's definition leaves out of the mean, and ``chain_counts`` ends its walk.
"""

import pytest
import torch

from lean_laguna import LLM, SamplingParams
from lean_laguna.models.catalog import resolve_model
from lean_laguna.models.checkpoint import load_laguna
from lean_laguna.models.drafter_checkpoint import load_drafter
from lean_laguna.train.documents import Document
from lean_laguna.train.drafter_eval import correct_slots, evaluate_documents, said_on
from lean_laguna.train.generated import Generated
from lean_laguna.train.metrics import accepted_lengths, chain_counts

NUM_DRAFT_TOKENS = 7
# In our own words, so in no training text.
PROMPTS = (
    "class TemperatureLog:\n    def __init__(self, path):\n        self.path = path",
    'def merge_sorted(left, right):\n    """Merge two sorted lists."""\n    result = []',
)
TASKS = ("checks a key", "counts lines", "filters words")


@pytest.fixture(scope="module")
def engine():
    return LLM(
        "nano", speculative_config={"model": "nano-dflash", "num_speculative_tokens": NUM_DRAFT_TOKENS}
    )


@pytest.fixture(scope="module")
def pair():
    target = load_laguna(resolve_model("nano"), dtype=torch.float32, device="cpu").requires_grad_(False)
    folder = resolve_model("nano-dflash")
    return target, load_drafter(folder, target.config, dtype=torch.float32, device="cpu")


def accepted_everywhere(pair, prompt, written):
    """Return L at each written position, as the trainer's evaluation finds it."""
    target, drafter = pair
    tokens = torch.tensor([[*prompt, *written]], dtype=torch.int32)
    text = Generated(tokens, torch.tensor([len(prompt)]), 0.0, 0, target.config.vocab_size)
    with torch.no_grad():
        correct, mask = correct_slots(drafter, target, text, 0, 1, NUM_DRAFT_TOKENS)
    return accepted_lengths(correct, mask).tolist()


@pytest.mark.parametrize("max_tokens", [64, 63, 3])
def test_tau_chain_is_the_mean_acceptance_length_as_served(engine, pair, max_tokens):
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    for result in engine.generate(list(PROMPTS), params):
        completion = result.outputs[0]
        served = completion.speculation
        accepted = accepted_everywhere(pair, result.prompt_token_ids, completion.token_ids)
        cycles, drafts = chain_counts(accepted, 0, max_tokens)
        assert (cycles, drafts) == (served.num_drafts, served.num_accepted_tokens)
        assert served.mean_acceptance_length == pytest.approx(1 + drafts / cycles)
        # Each token has one origin: the prefill, an accepted draft, or the target's own choice in a step.
        assert 1 + drafts + served.num_steps == max_tokens
        assert served.num_steps - served.num_drafts in (0, 1)  # 1: the plain step for the last token


def test_without_room_for_a_draft_neither_counts_a_cycle(engine, pair):
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    completion = engine.generate([PROMPTS[0]], params)[0].outputs[0]
    assert (completion.speculation.num_drafts, completion.speculation.num_steps) == (0, 1)
    assert chain_counts([NUM_DRAFT_TOKENS] * 2, 0, 2) == (0, 0)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_documents_that_end_by_themselves_or_by_a_limit_are_walked_as_served(engine, pair, temperature):
    """Drafts past an end that the target chose are made and counted: nobody knew that it would end there."""
    target, drafter = pair
    params = SamplingParams(temperature=temperature, max_tokens=96, seed=3)
    asked = [[{"role": "user", "content": f"Write a Python function that {what}."}] for what in TASKS]
    prompts = [engine.chat_template.render(question) for question in asked]
    cycles = drafts = 0
    documents = []
    for result in engine.generate(prompts, params):
        answer, prompt = result.outputs[0], result.prompt_token_ids
        cycles += answer.speculation.num_drafts
        drafts += answer.speculation.num_accepted_tokens
        tokens = torch.tensor([*prompt, *answer.token_ids], dtype=torch.int32)
        written = torch.arange(len(tokens)) >= len(prompt)
        is_stopped = answer.finish_reason == "stop"
        documents.append(Document("a", tokens, written, temperature, answer.seed, is_stopped))
    assert {document.is_stopped for document in documents} == {True, False}
    said = [said_on(document, target, NUM_DRAFT_TOKENS) for document in documents]
    figures = evaluate_documents(drafter, target, said, NUM_DRAFT_TOKENS)
    assert figures["documents_tau_chain"] == 1 + drafts / cycles
