"""Grammars and thinking budgets hold, and speculation changes nothing about them: any target, any drafter."""

import functools
import json
import random
import re

import pytest
import tokenizers

from lean_laguna.core.structured_outputs import StructuredOutputs
from lean_laguna.core.types import SamplingParams
from lean_laguna.models.tokenizer import Tokenizer
from lean_laguna.spec.grammar import GrammarCompiler
from lean_laguna.spec.noise import NoiseCache
from lean_laguna.spec.thinking import Thinking, ThinkingBudget, ThinkTags
from support.decoding import (
    ToyTarget,
    decode,
    forced_drafter,
    model_drafter,
    new_request,
    random_drafter,
    scripted_drafter,
)
from support.tokenizers import byte_level_json

VOCAB, EOS = 322, 2
CASES = 64
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "tags": {"type": "array", "items": {"enum": ["red", "green", 3]}, "maxItems": 3},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def is_person(text):
    found = json.loads(text)
    return (
        set(found) <= set(PERSON["properties"])
        and len(found["name"]) <= 6
        and 0 <= found["age"] <= 120
        and all(tag in ("red", "green", 3) for tag in found.get("tags", []))
    )


GRAMMARS = [
    (StructuredOutputs(json=PERSON), is_person),
    (StructuredOutputs(json=PERSON, disable_any_whitespace=True), is_person),
    (StructuredOutputs(json_object=True), lambda text: isinstance(json.loads(text), dict)),
    (StructuredOutputs(regex=r"(ab?c){1,4}-[0-9]{2,5}"), re.compile(r"(ab?c){1,4}-[0-9]{2,5}").fullmatch),
    (StructuredOutputs(choice=["yes", "no", "no, never"]), ["yes", "no", "no, never"].__contains__),
    (StructuredOutputs(grammar='start: "(" start ")" | "x"'), re.compile(r"\(*x\)*").fullmatch),
    (None, lambda text: True),
]


@functools.cache
def tokenizer():
    return Tokenizer(tokenizers.Tokenizer.from_str(byte_level_json()), (EOS,))


@functools.cache
def compiler():
    return GrammarCompiler(tokenizer(), VOCAB)


@functools.cache
def tags():
    return ThinkTags.of(tokenizer())


class TalkativeTarget(ToyTarget):
    """Likes to end lines, to close and to open its thinking, and to stop, more than chance has it."""

    def row(self, tokens):
        scores = super().row(tokens)
        favoured = [tags().end_id, tags().start_id, EOS, *tokenizer().encode('\n"}1)')]
        scores[favoured] += 2 * self.spread
        return scores


def random_case(seed):
    rng = random.Random(seed)
    structured, fits = rng.choice(GRAMMARS)
    budget = rng.choice([None, 0, 1, 7, 16, 24])
    max_tokens = rng.choice([1, 9, 40, 90])
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.7, 1.5]),
        top_p=rng.choice([1.0, 0.9]),
        top_k=rng.choice([0, 0, 5]),
        min_p=rng.choice([0.0, 0.05]),
        repetition_penalty=rng.choice([1.0, 1.3]),
        frequency_penalty=rng.choice([0.0, 0.5]),
        logit_bias=rng.choice([None, {EOS: -5.0, 80: 3.0}]),
        min_tokens=min(max_tokens, rng.choice([0, 0, 6])),
        max_tokens=max_tokens,
        logprobs=rng.choice([None, 2]),
        thinking_token_budget=budget,
        structured_outputs=structured,
    )
    target = TalkativeTarget(VOCAB, salt=seed, spread=rng.choice([0.5, 2.0, 5.0]))
    opening = rng.choice([[], [tags().start_id], [tags().end_id]])
    prompt = [*tokenizer().encode("a, b"), *opening]
    bad_words = rng.choice([[], [tokenizer().encode("a")], [tokenizer().encode('"a')]])

    def fresh():
        constraints = []
        if structured is not None:
            constraints.append(compiler().constraint(structured, prompt, tags()))
        if budget is not None:
            constraints.append(ThinkingBudget(budget, tags(), prompt))
        return new_request(
            target,
            prompt,
            params,
            seed=seed,
            bad_word_ids=bad_words,
            eos_token_ids=tokenizer().eos_token_ids,
            constraints=constraints,
        )

    return rng, target, fresh, fits


def check_constraints(request, done, fits):
    thinking = Thinking(tags().is_open_after(request.prompt_token_ids))
    answer = []
    for token in done.token_ids:
        if not thinking.is_open and token not in (*tokenizer().eos_token_ids, tags().start_id, tags().end_id):
            answer.append(token)
        thinking = thinking.after(token, tags())
    budget = request.params.thinking_token_budget
    assert budget is None or thinking.num_tokens <= budget
    text = tokenizer().decode(answer, skip_special_tokens=False)
    if done.finish_reason == "stop" and request.params.structured_outputs is not None:
        assert fits(text), text


def check_cases(seeds):
    num_accepted = num_stopped = 0
    for seed in seeds:
        rng, target, fresh, fits = random_case(seed)
        plain = decode(target, fresh())
        check_constraints(fresh(), plain, fits)
        num_stopped += plain.finish_reason == "stop"
        noise = NoiseCache(VOCAB)
        for drafter in (
            forced_drafter(rng.choice([1, 5, 40])),
            random_drafter(VOCAB, 3, rng),
            scripted_drafter(plain.token_ids, VOCAB, 9, 1.0, rng),
            scripted_drafter([*plain.token_ids, *[EOS] * 9], VOCAB, 9, 0.7, rng),
            model_drafter(TalkativeTarget(VOCAB, salt=seed), 7, rng),
        ):
            drafted = decode(target, fresh(), drafter, noise=noise)
            assert drafted.outcome() == plain.outcome(), seed
            num_accepted += drafted.stats.num_accepted_tokens
    return num_accepted, num_stopped


@pytest.mark.parametrize("part", range(4))
def test_speculation_changes_nothing_and_constraints_hold(part):
    num_accepted, num_stopped = check_cases(range(part, CASES, 4))
    assert num_accepted > 200
    assert num_stopped > 5


@pytest.mark.slow
def test_speculation_changes_nothing_in_many_cases():
    check_cases(range(CASES, 1600))


def test_foreseen_tokens_are_always_accepted():
    structured = StructuredOutputs(json=PERSON, disable_any_whitespace=True)
    for temperature in (0.0, 1.0):
        for seed in range(4):
            target = TalkativeTarget(VOCAB, salt=seed)
            params = SamplingParams(temperature=temperature, max_tokens=90, structured_outputs=structured)
            constraint = compiler().constraint(structured, [], None)
            request = new_request(
                target,
                [70],
                params,
                seed=seed,
                eos_token_ids=tokenizer().eos_token_ids,
                constraints=[constraint],
            )
            done = decode(target, request, forced_drafter(40))
            assert done.stats.num_accepted_tokens == done.stats.num_draft_tokens > 5


def test_allowed_tokens_that_the_grammar_runs_out_of_end_it_alike():
    structured = StructuredOutputs(regex="[ab]{3,9}c")
    letters = [tokenizer().encode(letter)[0] for letter in "ab"]

    def fresh(seed):
        return new_request(
            TalkativeTarget(VOCAB, salt=seed),
            [70],
            SamplingParams(temperature=1.0, max_tokens=40, allowed_token_ids=letters),
            seed=seed,
            eos_token_ids=tokenizer().eos_token_ids,
            constraints=[compiler().constraint(structured, [], None, letters)],
        )

    for seed in range(4):
        target, rng = TalkativeTarget(VOCAB, salt=seed), random.Random(seed)
        plain = decode(target, fresh(seed))
        assert set(plain.token_ids[:9]) <= set(letters)
        assert len(plain.token_ids) == 10
        assert plain.finish_reason == "stop"
        for drafter in (
            random_drafter(VOCAB, 3, rng),
            scripted_drafter(plain.token_ids, VOCAB, 12, 0.9, rng),
            forced_drafter(5),
        ):
            assert decode(target, fresh(seed), drafter).outcome() == plain.outcome(), seed
