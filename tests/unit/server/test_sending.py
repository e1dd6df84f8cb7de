import asyncio
import json

import pytest
from starlette.requests import Request

from lean_laguna.server.errors import ApiError
from lean_laguna.server.sending import DONE, JSON, ClientGoneError, EventStream, data, until_gone


class Client:
    """The other side of one ASGI call; leaves when told."""

    def __init__(self):
        self.left, self.sent = asyncio.Event(), []

    async def receive(self):
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        self.sent.append(message)

    @property
    def body(self):
        return b"".join(message.get("body", b"") for message in self.sent)


async def forever(client, after):
    for number in range(10**9):
        if number == after:
            client.left.set()
        yield data({"n": number})
        await asyncio.sleep(0)


def test_events_are_sent_and_the_stream_is_closed():
    async def scenario():
        async def events():
            yield data({"a": 1})
            yield data({"b": "🦊"}, "named")
            yield DONE

        client, ended = Client(), []
        await EventStream(events(), lambda: ended.append(True))({}, client.receive, client.send)
        assert client.body.decode() == 'data: {"a":1}\n\nevent: named\ndata: {"b":"🦊"}\n\ndata: [DONE]\n\n'
        assert client.sent[-1]["more_body"] is False
        assert ended == [True]

    asyncio.run(scenario())


def test_a_stream_ends_when_the_client_leaves():
    async def scenario():
        client, ended = Client(), []
        stream = EventStream(forever(client, 3), lambda: ended.append(True))
        await asyncio.wait_for(stream({}, client.receive, client.send), 10)
        assert ended == [True]
        assert len(client.sent) < 20

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("error", "message"), [(ApiError(503, "stopping"), "stopping"), (KeyError("x"), "failed")]
)
def test_a_failure_on_the_way_is_an_event_and_hides_its_details(error, message):
    async def scenario():
        async def events():
            yield data({"a": 1})
            raise error

        client = Client()
        await EventStream(events(), lambda: None)({}, client.receive, client.send)
        first, second, last = client.body.decode().strip().split("\n\n")
        assert (first, last) == ('data: {"a":1}', "data: [DONE]")
        assert message in json.loads(second.removeprefix("data: "))["error"]["message"]

    asyncio.run(scenario())


def test_work_is_awaited_or_dropped_when_the_client_leaves():
    async def scenario():
        async def answer():
            return 5

        client, told = Client(), []
        request = Request({"type": "http"}, client.receive)
        assert await until_gone(request, answer(), lambda: told.append(True)) == 5
        assert not told
        client.left.set()
        with pytest.raises(ClientGoneError):
            await until_gone(request, asyncio.sleep(60), lambda: told.append(True))
        assert told == [True]

    asyncio.run(scenario())


def test_a_fault_while_the_answer_is_put_together_drops_what_it_was_reading():
    async def scenario():
        async def broken():
            raise KeyError("a fault of ours")

        client, told = Client(), []
        with pytest.raises(KeyError):
            await until_gone(Request({"type": "http"}, client.receive), broken(), lambda: told.append(True))
        assert told == [True]

    asyncio.run(scenario())


def test_a_stream_whose_first_word_cannot_be_sent_drops_its_request():
    async def scenario():
        async def send(message):
            raise OSError("the client is gone")

        client, ended = Client(), []
        stream = EventStream(forever(client, -1), lambda: ended.append(True))
        await asyncio.wait_for(stream({}, client.receive, send), 10)
        assert ended == [True]

    asyncio.run(scenario())


def test_json_has_no_infinities_in_it():
    assert JSON({"a": float("inf"), "b": [1, "é"]}).body == '{"a":null,"b":[1,"é"]}'.encode()
