"""What ends a completion inside an accepted block ends it where plain decoding would have ended it."""

import dataclasses

import pytest

from lean_laguna.core.types import SamplingParams
from support.engines import (
    PROPOSERS,
    complete,
    make_engine,
    outcome,
    plain,
    scripts_of,
    tiny_tokenizer,
    tokens_of,
)

FREE = SamplingParams(temperature=0.9, max_tokens=30, ignore_eos=True, seed=11, logprobs=1)
PROMPT = tokens_of(4, 14)


def free_run():
    return plain(PROMPT, FREE).outputs[0]


def check(params, length=7):
    """Run plainly and with an oracle that drafts past every ending; return the plain completion."""
    expected = plain(PROMPT, params)
    for name in ("oracle", "mixed"):
        proposer = PROPOSERS[name]({11: free_run().token_ids})
        output = complete(make_engine(proposer, length), PROMPT, params)
        assert outcome(output) == outcome(expected)
        completion = output.outputs[0]
        assert len(completion.token_ids) == len(completion.logprobs) == len(completion.is_draft_token)
    return expected.outputs[0]


@pytest.mark.parametrize("place", range(0, 24, 3))
def test_stop_token_at_any_place_of_a_block(place):
    token = free_run().token_ids[place]
    completion = check(dataclasses.replace(FREE, stop_token_ids=[token]))
    assert completion.token_ids == free_run().token_ids[: free_run().token_ids.index(token) + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", token)


@pytest.mark.parametrize("place", [1, 2, 5, 8, 9, 15])
def test_produced_token_declared_end_of_sequence(place, monkeypatch):
    token = free_run().token_ids[place]
    expected_ids = free_run().token_ids[: free_run().token_ids.index(token) + 1]
    tokenizer = tiny_tokenizer()
    script = free_run().token_ids
    monkeypatch.setattr(tokenizer, "eos_token_ids", (token,))
    params = dataclasses.replace(FREE, ignore_eos=False)
    outputs = [
        complete(make_engine(), PROMPT, params),
        complete(make_engine(PROPOSERS["oracle"]({11: script}), 7), PROMPT, params),
    ]
    assert outcome(outputs[0]) == outcome(outputs[1])
    assert outputs[0].outputs[0].token_ids == expected_ids
    assert (outputs[0].outputs[0].finish_reason, outputs[0].outputs[0].stop_reason) == ("stop", None)


@pytest.mark.parametrize("start", range(0, 20, 4))
@pytest.mark.parametrize("keeps", [False, True])
def test_stop_text_across_tokens(start, keeps):
    stop = free_run().text[start : start + 3]
    params = dataclasses.replace(FREE, stop=[stop], include_stop_str_in_output=keeps)
    completion = check(params)
    end = free_run().text.index(stop)
    assert completion.text == free_run().text[: end + len(stop) if keeps else end]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)


@pytest.mark.parametrize("max_tokens", range(1, 19))
def test_any_limit_delivers_what_was_asked(max_tokens):
    completion = check(dataclasses.replace(FREE, max_tokens=max_tokens))
    assert completion.token_ids == free_run().token_ids[:max_tokens]
    assert completion.finish_reason == "length"


def test_earlier_stop_hides_a_later_limit_and_the_other_way_round():
    token = free_run().token_ids[6]
    place = free_run().token_ids.index(token)
    stopped = check(dataclasses.replace(FREE, stop_token_ids=[token], max_tokens=place + 2), length=15)
    assert stopped.finish_reason == "stop"
    cut = check(dataclasses.replace(FREE, stop_token_ids=[token], max_tokens=place), length=15)
    assert cut.finish_reason == "length"


def test_min_tokens_counts_every_committed_token():
    token = free_run().token_ids[3]
    params = dataclasses.replace(FREE, stop_token_ids=[token], min_tokens=10, logit_bias={token: 20.0})
    expected = plain(PROMPT, params).outputs[0]
    script = scripts_of(plain(PROMPT, params))
    for name in ("oracle", "never", "mixed"):
        output = complete(make_engine(PROPOSERS[name](script), 7), PROMPT, params)
        assert output.outputs[0].token_ids == expected.token_ids
    assert len(expected.token_ids) == 11
    assert expected.token_ids[-1] == token


@pytest.mark.parametrize("drafter", [None, "oracle", "mixed"])
def test_deltas_never_show_a_stop_text_and_add_up(drafter):
    stop = free_run().text[9:13]
    params = dataclasses.replace(FREE, stop=[stop])
    proposer = PROPOSERS[drafter](scripts_of(plain(PROMPT, FREE))) if drafter else None
    engine = make_engine(proposer, 7 if drafter else None)
    engine.add_request(PROMPT, params)
    deltas = []
    while engine.has_unfinished:
        deltas += engine.step()
    expected = plain(PROMPT, params).outputs[0]
    assert "".join(delta.text for delta in deltas) == expected.text
    assert sum((delta.token_ids for delta in deltas), ()) == expected.token_ids
    assert sum((delta.logprobs for delta in deltas), ()) == expected.logprobs
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["stop"]
    assert deltas[-1].is_request_finished
