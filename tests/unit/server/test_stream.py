import asyncio

import pytest

from lean_laguna.core.types import SamplingParams
from lean_laguna.engine.output import CompletionDelta
from lean_laguna.server.stream import Prompt, Stream


def piece(index=0, text="", tokens=(), reason=None, logprobs=None):
    return CompletionDelta(
        "r", index, text, tuple(tokens), logprobs, (False,) * len(tokens), reason, None, False
    )


def stream(n=1, prompts=1):
    return Stream([Prompt((1,), SamplingParams(n=n))] * prompts)


def test_what_waits_is_merged_into_one_piece_per_completion():
    async def scenario():
        one = stream(n=2, prompts=2)
        one.put(0, piece(0, "a", [1]))
        one.put(1, piece(1, "x", [9]))
        one.put(0, piece(0, "bc", [2, 3], logprobs=({2: None}, {3: None})))
        one.put(0, piece(0, "", [4], "stop"))
        one.finish()
        first, second = await one.next()
        assert (first.choice, first.text, first.token_ids, first.num_tokens) == (0, "abc", [1, 2, 3, 4], 4)
        assert (first.finish_reason, len(first.logprobs)) == ("stop", 2)
        assert (second.choice, second.text) == (3, "x")
        assert await one.next() == []

    asyncio.run(scenario())


def test_a_reader_waits_until_it_is_woken_and_gets_every_token_once():
    async def scenario():
        one = stream()
        reader = asyncio.ensure_future(one.next())
        await asyncio.sleep(0)
        assert not reader.done()
        one.put(0, piece(0, "a", [1]))
        one.wake()
        assert [delta.text for delta in await reader] == ["a"]
        one.put(0, piece(0, "b", [2]))
        (delta,) = await one.next()
        assert (delta.text, delta.token_ids, delta.num_tokens) == ("b", [2], 2)

    asyncio.run(scenario())


def test_what_was_said_before_a_failure_still_comes():
    async def scenario():
        one = stream()
        one.put(0, piece(0, "a", [1]))
        one.fail(RuntimeError("gone"))
        assert [delta.text for delta in await one.next()] == ["a"]
        with pytest.raises(RuntimeError, match="gone"):
            await one.next()

    asyncio.run(scenario())


def test_acceptance_is_told_once():
    async def scenario():
        one = stream()
        one.settle(ValueError("no"))
        one.settle(None)
        with pytest.raises(ValueError, match="no"):
            await one.accepted()

    asyncio.run(scenario())
