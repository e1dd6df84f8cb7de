import asyncio

import pytest
from starlette.requests import Request

from lean_laguna.core.types import SamplingParams
from lean_laguna.server.engine_thread import EngineThread
from lean_laguna.server.errors import ApiError
from lean_laguna.server.metrics import Metrics
from lean_laguna.server.service import Service
from lean_laguna.server.settings import ServerConfig
from lean_laguna.server.stream import Prompt
from support.servers import tiny

STAYING = Request({"type": "http"}, receive=lambda: asyncio.Event().wait())  # its client never leaves
PROMPT = Prompt((40, 50), SamplingParams(max_tokens=5, ignore_eos=True))


def with_service(scenario):
    """Run a scenario over a server that takes one running and one waiting completion."""

    async def run():
        settled, metrics = asyncio.Event(), Metrics("m")
        engine = EngineThread(tiny(max_num_seqs=1), metrics, settled.set)
        try:
            await settled.wait()
            await scenario(Service(ServerConfig(max_queued_seqs=1), engine, metrics))
        finally:
            engine.stop("the test is over")
            assert await asyncio.to_thread(engine.join, 20)

    asyncio.run(run())


async def tokens(stream):
    count = 0
    while deltas := await stream.next():
        count += sum(len(delta.token_ids) for delta in deltas)
    return count


def test_requests_held_at_the_gate_count_as_waiting():
    async def scenario(service):
        service.gate.hold("a test")
        held = [asyncio.ensure_future(service.submit(STAYING, [PROMPT])) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="2 completions run or wait, and at most 2 may") as caught:
            await service.submit(STAYING, [PROMPT])
        assert (caught.value.status, caught.value.code) == (429, "queue_full")
        held[1].cancel()
        await asyncio.wait(held[1:])
        held[1] = asyncio.ensure_future(
            service.submit(STAYING, [PROMPT])
        )  # the place of who left is free again
        await asyncio.sleep(0)
        service.gate.let_go("a test")
        assert [await tokens(await submitted) for submitted in held] == [5, 5]
        assert service.engine.num_live_seqs == 0
        assert await tokens(await service.submit(STAYING, [PROMPT])) == 5

    with_service(scenario)


def test_a_request_held_at_the_gate_is_refused_when_the_server_stops():
    async def scenario(service):
        service.gate.hold("a test")
        held = asyncio.ensure_future(service.submit(STAYING, [PROMPT]))
        await asyncio.sleep(0)
        service.is_stopping = True
        service.gate.let_all_in()
        with pytest.raises(ApiError, match="the server is stopping") as caught:
            await held
        assert caught.value.status == 503

    with_service(scenario)


def test_a_gate_that_two_hold_opens_when_both_have_let_go():
    async def scenario(service):
        service.gate.hold("one")
        service.gate.hold("two")
        held = asyncio.ensure_future(service.submit(STAYING, [PROMPT]))
        await asyncio.sleep(0)
        service.gate.let_go("one")
        for _ in range(20):
            await asyncio.sleep(0)
        assert service.engine.num_live_seqs == 0
        service.gate.let_go("two")
        service.gate.hold("three")  # before the waiter's turn has come
        for _ in range(20):
            await asyncio.sleep(0)
        assert service.engine.num_live_seqs == 0
        service.gate.let_go("three")
        assert await tokens(await held) == 5

    with_service(scenario)
