import asyncio

import pytest

from lean_laguna.core.errors import CheckpointError, RequestError
from lean_laguna.core.types import SamplingParams
from lean_laguna.server.engine_thread import EngineThread
from lean_laguna.server.errors import ApiError
from lean_laguna.server.metrics import Metrics
from lean_laguna.server.stream import Prompt, Stream
from support.engines import assert_nothing_held, plain, tokens_of
from support.servers import tiny

PARAMS = SamplingParams(max_tokens=30, ignore_eos=True, seed=3)


def on_thread(scenario, load=None, metrics=None):
    async def run():
        settled = asyncio.Event()
        engine = EngineThread(load or tiny(), metrics or Metrics("m"), settled.set)
        try:
            await settled.wait()
            return await scenario(engine)
        finally:
            engine.stop("the test is over")
            assert await asyncio.to_thread(engine.join, 20)

    return asyncio.run(run())


async def read(stream):
    text = ""
    while deltas := await stream.next():
        text += "".join(delta.text for delta in deltas)
    return text


def test_requests_run_and_the_count_of_live_ones_goes_back_to_nothing():
    async def scenario(engine):
        streams = [Stream([Prompt(tuple(tokens_of(i, 9)), PARAMS)]) for i in range(3)]
        for stream in streams:
            await engine.submit(stream)
        assert engine.num_live_seqs == 3
        texts = await asyncio.gather(*map(read, streams))
        await asyncio.sleep(0)
        assert engine.num_live_seqs == 0
        return texts

    assert on_thread(scenario) == [plain(tokens_of(i, 9), PARAMS).outputs[0].text for i in range(3)]


def test_a_request_of_several_prompts_is_taken_whole_or_not_at_all():
    async def scenario(engine):
        stream = Stream([Prompt((40, 50), PARAMS), Prompt((10**6,), PARAMS)])
        with pytest.raises(RequestError, match="not in the vocabulary"):
            await engine.submit(stream)
        await asyncio.sleep(0)
        assert engine.num_live_seqs == 0
        await engine.call(lambda llm: assert_nothing_held(llm.engine))

    on_thread(scenario)


def test_an_aborted_request_ends_for_its_reader_and_frees_what_it_held():
    async def scenario(engine):
        stream = Stream([Prompt((40, 50), SamplingParams(max_tokens=240, ignore_eos=True))])
        await engine.submit(stream)
        await stream.next()
        engine.abort(stream)
        engine.abort(stream)
        await read(stream)
        await engine.call(lambda llm: assert_nothing_held(llm.engine))
        assert engine.num_live_seqs == 0

    on_thread(scenario)


@pytest.mark.parametrize("how", ["abort", "error"])
def test_a_completion_is_counted_once_however_its_request_ends(how):
    """One prompt of a request ends by itself, then the other is dropped or fails."""
    metrics = Metrics("m")
    long = SamplingParams(max_tokens=240, ignore_eos=True)

    async def scenario(engine):
        stream = Stream([Prompt((40, 50), SamplingParams(max_tokens=1)), Prompt((40, 60), long)])
        await engine.submit(stream)
        while stream.num_ended == 0:
            await stream.next()
        if how == "abort":
            engine.abort(stream)
            await read(stream)
        else:
            await engine.call(lambda llm: engine.fail_all("enough"))
            with pytest.raises(ApiError, match="enough"):
                await read(stream)

    on_thread(scenario, metrics=metrics)
    text = metrics.render(None, 0).decode()
    counts = {}
    for line in text.splitlines():
        if line.startswith("vllm:request_success_total{"):
            counts[line.split('finished_reason="')[1].partition('"')[0]] = float(line.rsplit(" ", 1)[1])
    assert counts == {"stop": 0, "length": 1, "abort": how == "abort", "error": how == "error"}


def test_paused_it_takes_requests_and_computes_nothing():
    async def scenario(engine):
        engine.set_paused(True)
        stream = Stream([Prompt((40, 50), PARAMS)])
        await engine.submit(stream)
        await asyncio.sleep(0.05)
        assert await engine.call(lambda llm: llm.stats().num_generated_tokens) == 0
        engine.set_paused(False)
        return await read(stream)

    assert on_thread(scenario) == plain([40, 50], PARAMS).outputs[0].text


def test_stopping_fails_what_runs_and_refuses_what_comes():
    async def scenario(engine):
        stream = Stream([Prompt((40, 50), SamplingParams(max_tokens=240, ignore_eos=True))])
        await engine.submit(stream)
        engine.stop("enough")
        with pytest.raises(ApiError, match="enough"):
            await read(stream)
        await asyncio.to_thread(engine.join, 20)
        with pytest.raises(ApiError, match="stopping") as caught:
            await engine.submit(Stream([Prompt((40,), PARAMS)]))
        assert caught.value.status == 503

    on_thread(scenario)


def test_a_model_that_cannot_be_loaded_is_reported_and_serves_nothing():
    def load():
        raise CheckpointError("no such file")

    async def scenario(engine):
        assert engine.phase == "failed"
        assert str(engine.error) == "no such file"
        with pytest.raises(ApiError, match="could not be loaded"):
            _ = engine.llm

    on_thread(scenario, load)


def test_what_a_called_function_raises_is_the_callers():
    async def scenario(engine):
        with pytest.raises(ZeroDivisionError):
            await engine.call(lambda llm: 1 / 0)
        assert await engine.call(lambda llm: 5) == 5

    on_thread(scenario)


def test_a_request_that_the_engine_let_go_of_in_a_step_that_failed_is_told_so():
    """As one whose prompt cannot be computed again; the others go on."""

    async def scenario(engine):
        lost, other = (Stream([Prompt(tuple(tokens_of(i, 9)), PARAMS)]) for i in range(2))

        def once(llm):
            step = llm.engine.step

            def failing():
                llm.engine.step = step
                llm.engine.abort(lost.states[0].request_id)
                raise RuntimeError("a kernel's")

            llm.engine.step = failing

        submitted = [asyncio.ensure_future(engine.submit(stream)) for stream in (other, lost)]
        await asyncio.gather(*submitted)
        await engine.call(once)
        with pytest.raises(RuntimeError, match="a kernel's"):
            await asyncio.wait_for(read(lost), 20)
        assert await read(other) == plain(tokens_of(1, 9), PARAMS).outputs[0].text
        await asyncio.sleep(0)
        assert engine.num_live_seqs == 0

    on_thread(scenario)
