"""The engine against a loop that shares none of its machinery: the whole sequence anew for each token."""

import math

import pytest
import torch

from lean_laguna.core.types import SamplingParams
from support.engines import PROPOSERS, complete, make_engine, tiny_target, tokens_of

# The dense pass sums in another order than the paged one; a greedy choice closer than this is nobody's fault.
MARGIN = 1e-4


def dense_logits(tokens):
    target = tiny_target()
    with torch.no_grad():
        hidden = target.forward_dense(torch.tensor([tokens])).hidden_states[0]
        return hidden @ target.lm_head.weight.t()


def naive_greedy(prompt, max_tokens):
    """Return tokens and the smallest distance between the best and the second best logit met on the way."""
    tokens, margin = list(prompt), math.inf
    for _ in range(max_tokens):
        best, second = dense_logits(tokens)[-1].topk(2).values.tolist()
        margin = min(margin, best - second)
        tokens.append(int(dense_logits(tokens)[-1].argmax()))
    return tokens[len(prompt) :], margin


@pytest.mark.parametrize("num_prompt_tokens", [1, 7, 8, 9, 30])
@pytest.mark.parametrize("drafter", [None, "mixed", "dflash"])
def test_greedy_tokens_are_those_of_whole_sequence_recomputation(num_prompt_tokens, drafter):
    prompt = tokens_of(num_prompt_tokens, num_prompt_tokens)
    expected, margin = naive_greedy(prompt, 24)
    assert margin > MARGIN, "choose another prompt: this one has a near-tie"
    proposer = PROPOSERS[drafter]({1: expected}) if drafter else None
    engine = make_engine(proposer, 7 if drafter else None)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, seed=1)
    assert list(complete(engine, prompt, params).outputs[0].token_ids) == expected


def test_log_probabilities_are_those_of_whole_sequence_recomputation():
    prompt = tokens_of(3, 21)
    params = SamplingParams(
        temperature=0.8, max_tokens=12, ignore_eos=True, seed=1, logprobs=2, prompt_logprobs=2
    )
    output = complete(make_engine(PROPOSERS["dflash"]({}), 7), prompt, params)
    completion = output.outputs[0]
    tokens = [*prompt, *completion.token_ids]
    expected = torch.log_softmax(dense_logits(tokens).double(), -1)
    reported = [*output.prompt_logprobs[1:], *completion.logprobs]
    for position, candidates in enumerate(reported):
        row = expected[position]
        chosen = tokens[position + 1]
        assert candidates[chosen].rank == 1 + int((row > row[chosen]).sum())
        for token, candidate in candidates.items():
            # float32 logits of size about 10 from sums of 32 products in two orders
            assert candidate.logprob == pytest.approx(float(row[token]), abs=1e-4)
    total = sum(
        candidates[token].logprob
        for candidates, token in zip(completion.logprobs, completion.token_ids, strict=True)
    )
    assert completion.cumulative_logprob == total
