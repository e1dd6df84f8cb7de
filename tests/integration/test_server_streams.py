"""What a stream promises: whole characters, stops that never show, one end, and nobody waits for anybody."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support.servers import RunningServer, events_of, nano, running, tiny, wait_until

LONG = {"prompt": "def fib(n):", "ignore_eos": True, "temperature": 0}


def request_bytes(path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


@pytest.fixture(scope="module")
def own() -> Iterator[RunningServer]:
    """A server whose counters no other test moves; small chunks, so that prefill takes many steps."""
    with running(
        nano(prefill_chunk_size=16, max_num_seqs=4), send_buffer=8192, spec_decode_metrics="detailed"
    ) as up:
        yield up


def num_steps(server: RunningServer) -> int:
    return server.service.engine.llm.stats().num_steps


def is_idle(server: RunningServer) -> bool:
    llm = server.service.engine.llm
    pools = llm.engine.scheduler.pools
    return not llm.engine.has_unfinished and not any(pool.num_in_use for pool in pools)


def test_a_stop_text_never_leaks_however_it_is_cut(server: RunningServer) -> None:
    plain = server.ok("/v1/completions", **LONG, max_tokens=24)["choices"][0]["text"]
    for start in range(2, len(plain) - 12, 19):
        stop = plain[start : start + 9]
        for how in (False, {"num_speculative_tokens": 7}):
            chunks = server.events("/v1/completions", **LONG, max_tokens=24, stop=stop, speculative=how)
            text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
            assert text == plain[: plain.index(stop)]
            assert [c["choices"][0]["stop_reason"] for c in chunks if c["choices"][0]["stop_reason"]] == [
                stop
            ]


def test_characters_of_several_tokens_come_whole(server: RunningServer) -> None:
    # The bytes of one emoji and of one Korean syllable, one token each, are all that may be said.
    tokens = server.ok("/tokenize", prompt="🦊한")["tokens"]
    assert len(tokens) > 3
    bias = {str(token): 100.0 for token in tokens}
    body = {"prompt": "x", "logit_bias": bias, "max_tokens": 60, "temperature": 1.5, "seed": 5, "top_k": 0}
    whole = server.ok("/v1/completions", **body)["choices"][0]["text"]
    pieces = [chunk["choices"][0]["text"] for chunk in server.events("/v1/completions", **body)]
    assert "".join(pieces) == whole


def test_usage_comes_once_and_only_when_asked(server: RunningServer) -> None:
    plain = server.events("/v1/completions", **LONG, max_tokens=9)
    assert not any("usage" in chunk for chunk in plain)
    asked = server.events("/v1/completions", **LONG, max_tokens=9, stream_options={"include_usage": True})
    assert [chunk["usage"] for chunk in asked[:-1]] == [None] * (len(asked) - 1)
    assert asked[-1]["choices"] == []
    assert asked[-1]["usage"]["completion_tokens"] == 9


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_continuous_usage_counts_every_token_as_it_comes(server: RunningServer, path: str) -> None:
    prompt = (
        {"prompt": "x"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    )
    body = {**prompt, "temperature": 0, "max_tokens": 20, "ignore_eos": True, "return_token_ids": True}
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = server.events(path, **body, stream_options=options)
    seen = 0
    for chunk in chunks[:-1]:
        seen += sum(len(choice.get("token_ids", ())) for choice in chunk["choices"])
        assert chunk["usage"]["completion_tokens"] == seen
    assert chunks[-1]["usage"]["completion_tokens"] == seen == 20


def test_cached_prompt_tokens_are_reported(own: RunningServer) -> None:
    body = {"prompt": "def alpha(beta):\n    return beta\n" * 12, "max_tokens": 1}
    own.ok("/reset_prefix_cache")
    first, second = (own.ok("/v1/completions", **body)["usage"] for _ in range(2))
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["prompt_tokens_details"]["cached_tokens"] >= 64


def test_each_step_of_a_requests_speculation_is_told_where_asked_for(own: RunningServer) -> None:
    body = {**LONG, "max_tokens": 30, "speculative": {"num_speculative_tokens": 4}}
    told = own.ok("/v1/completions", **body)["metrics"]["speculative_decoding"]
    assert len(told["per_step_drafted"]) == len(told["per_step_accepted"]) == told["num_spec_steps"] > 1
    assert sum(told["per_step_drafted"]) == told["num_draft_tokens"]
    assert sum(told["per_step_accepted"]) == told["num_accepted_draft_tokens"]
    last = own.events("/v1/completions", **body, stream_options={"include_usage": True})[-1]
    assert last["metrics"]["speculative_decoding"] == told


def test_a_client_that_leaves_is_stopped_within_two_steps(own: RunningServer) -> None:
    with socket.create_connection(("127.0.0.1", own.port)) as connection:
        connection.sendall(request_bytes("/v1/completions", {**LONG, "max_tokens": 1900, "stream": True}))
        while b"data:" not in connection.recv(4096):
            pass
    wait_until(lambda: is_idle(own))
    stats = own.service.engine.llm.stats()
    assert stats.num_generated_tokens < 1900


def test_a_client_that_leaves_while_it_sends_is_no_fault(own: RunningServer, caplog: Any) -> None:
    request = request_bytes("/v1/completions", {**LONG, "max_tokens": 5})
    with socket.create_connection(("127.0.0.1", own.port)) as connection:
        connection.sendall(request[:-4])
    own.ok("/v1/completions", prompt="x", max_tokens=1)
    assert not [record for record in caplog.records if record.name.startswith("lean_laguna")]


def test_a_body_that_is_too_long_is_refused_before_it_is_sent(own: RunningServer) -> None:
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {10**11}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", own.port), timeout=20) as connection:
        connection.sendall(head.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


@contextlib.contextmanager
def at_most_two_steps_after_the_engine_is_told(own: RunningServer) -> Iterator[None]:
    engine = own.service.engine
    told: list[int] = []
    abort = engine.abort

    def noting(stream: Any) -> None:
        abort(stream)
        told.append(num_steps(own))

    engine.abort = noting  # type: ignore[method-assign]
    try:
        yield
        wait_until(lambda: told and is_idle(own))
    finally:
        engine.abort = abort  # type: ignore[method-assign]
    assert num_steps(own) - told[0] <= 2


def test_a_stream_that_is_left_costs_at_most_two_steps_more(own: RunningServer) -> None:
    body = {**LONG, "max_tokens": 1900, "stream": True}
    with (
        at_most_two_steps_after_the_engine_is_told(own),
        socket.create_connection(("127.0.0.1", own.port)) as connection,
    ):
        connection.sendall(request_bytes("/v1/completions", body))
        while b"data:" not in connection.recv(4096):
            pass


@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("how", ["close", "half-close"])
def test_leaving_while_the_prompt_is_computed_stops_it(
    own: RunningServer, is_streamed: bool, how: str
) -> None:
    own.ok("/reset_prefix_cache")
    before, generated = num_steps(own), own.service.engine.llm.stats().num_generated_tokens
    prompt = [300 + i % 700 for i in range(1900)]  # 119 chunks
    body = {"prompt": prompt, "max_tokens": 100, "stream": is_streamed}
    with (
        at_most_two_steps_after_the_engine_is_told(own),
        socket.create_connection(("127.0.0.1", own.port)) as connection,
    ):
        connection.sendall(request_bytes("/v1/completions", body))
        wait_until(lambda: num_steps(own) > before)
        if how == "half-close":
            connection.shutdown(socket.SHUT_WR)
            wait_until(lambda: is_idle(own))
    assert 1 <= num_steps(own) - before < 119
    assert own.service.engine.llm.stats().num_generated_tokens == generated


def test_a_reader_that_stands_still_holds_up_nobody_and_gets_everything(own: RunningServer) -> None:
    body = {
        **LONG,
        "max_tokens": 150,
        "speculative": False,
        "stream": True,
        "logprobs": 20,
        "stream_options": {"include_usage": True},
    }
    stalled = socket.socket()
    stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    stalled.connect(("127.0.0.1", own.port))
    with stalled:
        stalled.sendall(request_bytes("/v1/completions", body))
        other = own.events("/v1/completions", **LONG, max_tokens=60)
        assert other[-1]["choices"][0]["finish_reason"] == "length"
        wait_until(lambda: is_idle(own))  # generated to its end although nobody read
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            part = stalled.recv(65536)
            assert part
            received += part
    text = b"".join(_chunks(received.partition(b"\r\n\r\n")[2])).decode()
    chunks = events_of(text)
    assert chunks[-1]["usage"]["completion_tokens"] == 150
    said = [token for c in chunks[:-1] for token in c["choices"][0]["logprobs"]["tokens"]]
    assert len(said) == 150
    assert len(chunks) < 150, "pieces that waited were not merged"


def _chunks(body: bytes) -> Iterator[bytes]:
    """Take HTTP's chunked coding apart."""
    while body:
        size, _, body = body.partition(b"\r\n")
        yield body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]


def test_a_burst_beyond_what_runs_at_once_gets_what_each_gets_alone(own: RunningServer) -> None:
    bodies = [{"prompt": f"def f{i}(x):", "temperature": 1, "seed": i, "max_tokens": 12} for i in range(13)]
    alone = [own.ok("/v1/completions", **body)["choices"] for body in bodies]
    with ThreadPoolExecutor(13) as pool:
        burst = list(pool.map(lambda body: own.ok("/v1/completions", **body)["choices"], bodies))
    assert burst == alone
    assert is_idle(own)


def test_more_than_may_wait_is_told_to_come_back() -> None:
    with running(tiny(max_num_seqs=1), max_queued_seqs=1) as small:
        assert small.post("/v1/completions", prompt="x", n=3).status_code == 400
        streams = [
            threading.Thread(
                target=small.events, args=["/v1/completions"], kwargs={**LONG, "max_tokens": 200}
            )
            for _ in range(2)
        ]
        small.service.engine.set_paused(True)  # so that neither ends before the third comes
        for stream in streams:
            stream.start()
        wait_until(lambda: small.service.engine.num_live_seqs == 2)
        refused = small.post("/v1/completions", prompt="x")
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert refused.headers["retry-after"]
        small.service.engine.set_paused(False)
        for stream in streams:
            stream.join()
        assert small.ok("/v1/completions", prompt="x", max_tokens=1)


def test_stopping_ends_streams_with_an_error_and_frees_everything() -> None:
    found: list[dict[str, Any]] = []
    with running(nano(), shutdown_timeout_s=0) as up:
        reader = threading.Thread(
            target=lambda: found.extend(up.events("/v1/completions", **LONG, max_tokens=1900))
        )
        reader.start()
        wait_until(lambda: up.service.engine.num_live_seqs == 1)
        up.server.should_exit = True
        reader.join(20)
    assert found[-1]["error"]["code"] == "stopped"
