"""Any combination of sampling options gives with speculation and neighbours what it gives without."""

import dataclasses

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from lean_laguna.core.errors import RequestError
from lean_laguna.core.types import SamplingParams
from support.engines import (
    EOS,
    PROPOSERS,
    VOCAB,
    assert_nothing_held,
    make_engine,
    outcome,
    plain,
    run_all,
    scripts_of,
    tiny_tokenizer,
    tokens_of,
)

STRUCTURED = (
    {"json": {"type": "object", "properties": {"to": {"type": "string"}, "n": {"enum": [1, 22]}}}},
    {"regex": "(a|to| in){1,9}[0-9]{2}☃"},
    {"choice": ["yes", "no, never"]},
)
THINK = tiny_tokenizer().token_to_id("<think>")
TOKENS = st.integers(20, VOCAB - 1)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "n": st.integers(1, 3),
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        "top_p": st.sampled_from([0.3, 0.9, 1.0]),
        "top_k": st.sampled_from([0, 1, 5, 50]),
        "min_p": st.sampled_from([0.0, 0.05, 0.5]),
        "repetition_penalty": st.sampled_from([0.8, 1.0, 1.3]),
        "presence_penalty": st.sampled_from([-1.0, 0.0, 1.5]),
        "frequency_penalty": st.sampled_from([-0.5, 0.0, 1.0]),
        "logit_bias": st.dictionaries(TOKENS, st.sampled_from([-100.0, -3.0, 3.0, 8.0]), max_size=3),
        "allowed_token_ids": st.one_of(st.none(), st.lists(TOKENS, min_size=1, max_size=12)),
        "min_tokens": st.integers(0, 12),
        "max_tokens": st.integers(1, 24),
        "ignore_eos": st.booleans(),
        "logprobs": st.sampled_from([None, 0, 3]),
        "prompt_logprobs": st.sampled_from([None, 0, 2]),
        "bad_words": st.lists(st.sampled_from(["a", "to", " in", "☃", "x", "e"]), max_size=2),
        "include_stop_str_in_output": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "seed": st.integers(0, 2**64 - 1),
        "thinking_token_budget": st.sampled_from([None, 0, 2, 9]),
        "structured_outputs": st.sampled_from([None, None, *STRUCTURED]),
    },
)
# Where in the unstopped output a stop is put, as shares of its length: None puts none.
PLACES = st.one_of(st.none(), st.floats(0, 1))


def with_stops(params, prompt, token_place, text_place, eos_place):
    """Add stops that do occur, found by a run without them (the trick of report R24)."""
    free = plain(prompt, dataclasses.replace(params, n=1, prompt_logprobs=None)).outputs[0]
    changes = {}
    if token_place is not None:
        changes["stop_token_ids"] = [free.token_ids[int(token_place * (len(free.token_ids) - 1))]]
    if text_place is not None and len(free.text) > 2:
        start = int(text_place * (len(free.text) - 2))
        changes["stop"] = [free.text[start : start + 2], "never said"]
    if eos_place is not None:
        # A bias makes the end-of-sequence token likely, now and then.
        changes["logit_bias"] = {**(params.logit_bias or {}), EOS: 4.0 + 4 * eos_place}
    return dataclasses.replace(params, **changes)


@st.composite
def requests(draw):
    options = draw(OPTIONS)
    options["min_tokens"] = min(options.get("min_tokens", 0), options.setdefault("max_tokens", 16))
    params = SamplingParams(**{"seed": 7, **options})
    prompt = tokens_of(draw(st.integers(0, 3)), draw(st.sampled_from([1, 7, 8, 9, 17, 24, 25])))
    prompt += draw(st.sampled_from([[], [THINK]]))
    places = draw(PLACES), draw(PLACES), draw(PLACES)
    try:
        return prompt, with_stops(params, prompt, *places)
    except RequestError as error:
        if "no token that structured_outputs can begin with" not in str(error):
            raise
        reject()


@st.composite
def settings_of_engine(draw):
    return {
        "prefill_chunk_size": draw(st.sampled_from([4, 8, 32])),
        "enable_prefix_caching": draw(st.booleans()),
        "max_num_seqs": draw(st.sampled_from([1, 3, 8])),
    }


def check(request, drafter, length, engine_options, neighbours, is_repeated, lead):
    prompt, params = request
    expected = plain(prompt, params)
    proposer = PROPOSERS[drafter](scripts_of(expected))
    engine = make_engine(proposer, length, **engine_options)
    if is_repeated:
        engine.add_request(prompt, params)
        run_all(engine)
    others = [engine.add_request(*neighbour) for neighbour in neighbours]
    for _ in range(lead):
        engine.step()
    state = engine.add_request(prompt, params)
    run_all(engine)
    assert outcome(state.snapshot()) == outcome(expected)
    assert all(other.is_finished for other in others)
    assert_nothing_held(engine)


GIVEN = given(
    request=requests(),
    drafter=st.sampled_from(sorted(PROPOSERS)),
    length=st.sampled_from([0, 1, 3, 7, 15, "auto"]),
    engine_options=settings_of_engine(),
    neighbours=st.lists(requests(), max_size=3),
    is_repeated=st.booleans(),
    lead=st.integers(0, 6),
)
CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


@settings(max_examples=40, suppress_health_check=CHECKS)
@GIVEN
def test_any_combination_is_lossless(**case):
    check(**case)


@pytest.mark.slow
@settings(max_examples=1500, suppress_health_check=CHECKS)
@GIVEN
def test_many_combinations_are_lossless(**case):
    check(**case)


ONE_BY_ONE = {
    "temperature": {"temperature": 1.3},
    "top_p": {"top_p": 0.5},
    "top_k": {"top_k": 3},
    "min_p": {"min_p": 0.2},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": -1.5},
    "logit_bias": {"logit_bias": {70: 6.0, 71: 5.5}},
    "allowed_token_ids": {"allowed_token_ids": list(range(40, 90))},
    "min_tokens": {"min_tokens": 15, "ignore_eos": False, "logit_bias": {EOS: 7.0}},
    "bad_words": {"bad_words": ["et", ":", "Th", "K"]},
    "logprobs": {"logprobs": 5},
    "prompt_logprobs": {"prompt_logprobs": 5},
    "n": {"n": 3},
    "skip_special_tokens": {"skip_special_tokens": False, "logit_bias": {1: 5.0}},
    "thinking_token_budget": {"thinking_token_budget": 5},
    "structured_outputs": {"structured_outputs": STRUCTURED[0], "ignore_eos": False},
}


def prompt_for(option):
    return tokens_of(1, 19) + [THINK] * (option == "thinking_token_budget")


@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
@pytest.mark.parametrize("option", ONE_BY_ONE)
def test_each_option_alone_is_lossless(option, temperature):
    given_params = {"temperature": temperature, "max_tokens": 24, "ignore_eos": True, "seed": 9}
    params = SamplingParams(**(given_params | ONE_BY_ONE[option]))
    prompt = prompt_for(option)
    expected = plain(prompt, params)
    for drafter in ("oracle", "mixed", "dflash"):
        engine = make_engine(PROPOSERS[drafter](scripts_of(expected)), 7)
        state = engine.add_request(prompt, params)
        run_all(engine)
        assert outcome(state.snapshot()) == outcome(expected)


# What an option is compared with, where leaving it out is not the difference wanted.
OTHERWISE = {
    "min_tokens": {"ignore_eos": False, "logit_bias": {EOS: 7.0}},
    "skip_special_tokens": {"logit_bias": {1: 5.0}},
}


@pytest.mark.parametrize("option", sorted(set(ONE_BY_ONE) - {"logprobs", "prompt_logprobs", "n"}))
def test_each_option_changes_something(option):
    """Without this, the test above could pass for an option that is ignored everywhere."""
    base = {"temperature": 1.0, "max_tokens": 48, "ignore_eos": True, "seed": 9}
    prompt = prompt_for(option)
    without = plain(prompt, SamplingParams(**(base | OTHERWISE.get(option, {})))).outputs[0]
    with_it = plain(prompt, SamplingParams(**(base | ONE_BY_ONE[option]))).outputs[0]
    assert (without.token_ids, without.text) != (with_it.token_ids, with_it.text)
